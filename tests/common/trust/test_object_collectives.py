"""Objects between ranks: of the declared type, exact, and never run."""

import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import MalformedMessage
from megarl.common.trust.object_collectives import JSON, codec_of
from tests.support.attacks.attack import attack
from tests.support.worlds.world import World


@dataclass(frozen=True)
class Part:
    name: str
    values: tuple[float, ...]
    by_number: dict[int, float]
    path: Path | None = None


PART = codec_of(list[Part])
FLOATS = st.floats(allow_nan=False)


@given(st.lists(st.builds(Part, st.text(), st.tuples(FLOATS), st.dictionaries(st.integers(0, 9), FLOATS))))
def test_dataclasses_arrive_as_they_were(parts: list[Part]) -> None:
    assert PART.decode(PART.encode(parts)) == parts


def test_paths_numbers_of_numpy_and_nan() -> None:
    part = Part("a", (np.float64(0.1), math.inf), {1: np.float32(0.5)}, Path("/a/b"))
    (found,) = PART.decode(PART.encode([part]))
    assert found == Part("a", (0.1, math.inf), {1: 0.5}, Path("/a/b")) and type(found.values[0]) is float
    assert math.isnan(JSON.decode(JSON.encode({"x": math.nan}))["x"])


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_with_the_named_error(content: bytes) -> None:
    with suppress(MalformedMessage):
        assert all(type(part) is Part for part in PART.decode(content))


@pytest.mark.parametrize("content", [b"", b"\x91" * 100_000, b"\x92\x01", JSON.encode([{"name": 1}])])
def test_wrong_forms_are_refused(content: bytes) -> None:
    with pytest.raises(MalformedMessage, match="no list"):
        PART.decode(content)


def test_a_pickle_is_no_message(tmp_path: Path) -> None:
    content = attack(tmp_path / "ran")
    for codec in (PART, JSON):
        with pytest.raises(MalformedMessage):
            codec.decode(content)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists(), "the attack works where it is unpickled"


def test_what_cannot_be_sent_is_refused_by_the_sender() -> None:
    with pytest.raises(TypeError, match="a object cannot be sent"):
        JSON.encode(object())


@pytest.mark.world
def test_between_ranks(world: Callable[[int], World]) -> None:
    """Sizes differ between ranks, and one is empty."""
    found = world(2).run("tests.support.ranks.sync.objects:exchanged")
    assert found == [[["", "x" * 100], {"from": 1}]] * 2
