"""Per-token streams: one declaration each, transport without loss through rows and dumps, names that the loss uses."""

import ast
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.algorithms.objective.objective import WEIGHT_STREAMS, Objective
from megarl.queue.dump import read_batch, write_batch
from megarl.queue.routes import Routes
from megarl.queue.row_format import decode, decode_tag, encode
from megarl.queue.streams import (
    ADVANTAGES,
    CE_WEIGHTS,
    OLD_LOGPROBS,
    REF_KL_WEIGHTS,
    REFERENCE_LOGPROBS,
    RL_WEIGHTS,
    ROLLOUT_LOGPROBS,
    STREAMS,
    Stream,
    StreamRegistry,
    stream_row,
)
from megarl.queue.trajectory import Trajectory, VersionSpan
from tests.support.checkout import ROOT
from tests.support.rollout.declared_streams import EVERY_DTYPE, WEIGHT, declared

VALUES = {
    "float32": st.floats(width=32, allow_nan=False),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
}


OPTIONAL = tuple(stream for stream in STREAMS.from_rollout if stream.optional)


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with declared(*EVERY_DTYPE):
        yield


def trajectory(index: int, tokens: int, **streams: list[float]) -> Trajectory:
    return Trajectory(
        group_id=0,
        sample_index=index,
        prompt_ids=[1, 2],
        response_ids=list(range(tokens)),
        rollout_logprobs=[-1.0] * tokens,
        versions=(VersionSpan(0, 0, tokens),) if tokens else (),
        finish_reason="stop",
        reward=0.0,
        response_mask=[token % 2 for token in range(tokens)],
        streams=streams,
        turn_rewards=[0.1, -2.0][: min(index, tokens)],
        turn_starts=[0, 1][: min(index, tokens)],
    )


@st.composite
def rows(draw: st.DrawFn) -> list[Trajectory]:
    """Draw trajectories of 0 to 4 response tokens, each with any of the declared streams and without the others."""
    found = []
    for index in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(0, 4))
        given_streams = {
            stream.name: [draw(VALUES[stream.dtype]) for _ in range(tokens)]
            for stream in (*EVERY_DTYPE, *OPTIONAL)
            if draw(st.booleans())
        }
        found.append(trajectory(index, tokens, **given_streams))
    return found


def filled(row: Trajectory) -> Trajectory:
    """Return the trajectory with the declared fill value in place of every missing stream that is not optional."""
    tokens = len(row.response_ids)
    streams = {s.name: list(row.streams.get(s.name, [s.fill] * tokens)) for s in EVERY_DTYPE}
    return replace(
        row, streams=streams | {s.name: list(row.streams[s.name]) for s in OPTIONAL if s.name in row.streams}
    )


def same(row: Trajectory, other: Trajectory) -> bool:
    """Return whether two trajectories are equal, signs of zero and types of stream values included."""
    return row == other and exact(row) == exact(other)


def exact(row: Trajectory) -> list[list[tuple[type, bytes | float]]]:
    return [
        [(type(value), struct.pack("<d", value) if isinstance(value, float) else value) for value in each]
        for _, each in sorted(row.streams.items())
    ]


def test_a_row_is_as_long_as_the_streams_that_it_has() -> None:
    """A run whose rows bring no weights moves no bytes for them."""
    column, _ = encode([trajectory(0, 100), trajectory(1, 100, ce_weights=[0.5] * 100)])
    without, with_one = (end - start for start, end in pairwise(column["trajectory"].offsets().tolist()))
    assert with_one - without == 4 * 100


def test_rows_keep_the_experts_of_their_tokens_and_are_no_longer_without() -> None:
    many = Routes(np.arange(24, dtype=np.uint16).reshape(4, 3, 2) + 250)
    batch = [
        replace(trajectory(0, 3), routes=many),
        replace(trajectory(1, 5, ce_weights=[0.5] * 5), routes=Routes(np.ones((6, 1, 4), np.uint8))),
        trajectory(2, 3),
    ]
    column, tags = encode(batch)
    back = decode(column, tags)
    assert [row.routes for row in back] == [row.routes for row in batch]
    assert all(same(row, typed(filled(original))) for row, original in zip(back, batch, strict=True))
    longest, _, plain = (end - start for start, end in pairwise(column["trajectory"].offsets().tolist()))
    assert longest - plain == 24 * 2
    assert decode_tag(tags[0]) == batch[0].tag


@settings(deadline=None, max_examples=50)
@given(rows())
def test_rows_of_the_queue_keep_every_dtype_and_fill_what_is_missing(batch: list[Trajectory]) -> None:
    back = decode(*encode(batch))
    assert all(same(row, typed(filled(original))) for row, original in zip(back, batch, strict=True))


def typed(row: Trajectory) -> Trajectory:
    """Return the trajectory with stream values as the Python type of the stream's dtype."""
    convert = {"float32": float, "int64": int, "bool": bool}
    return replace(
        row, streams={name: [convert[STREAMS[name].dtype](v) for v in values] for name, values in row.streams.items()}
    )


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=rows())
def test_dumps_keep_every_dtype_and_fill_what_is_missing(tmp_path: Path, batch: list[Trajectory]) -> None:
    write_batch(tmp_path, 0, 0, batch)
    read = read_batch(tmp_path, 0).trajectories
    assert all(same(row, typed(filled(original))) for row, original in zip(read, batch, strict=True))


def test_a_dump_without_a_stream_is_read_and_gets_the_fill_value_later(tmp_path: Path) -> None:
    """A batch that was recorded before a stream was declared can be replayed."""
    del STREAMS._streams[WEIGHT.name]
    write_batch(tmp_path, 0, 0, [trajectory(0, 3)])
    STREAMS.declare(WEIGHT)
    (row,) = read_batch(tmp_path, 0).trajectories
    assert WEIGHT.name not in row.streams and stream_row(WEIGHT, row) == [1.0] * 3


def test_a_stream_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 0:0: stream 'test_weight' has 1 values for 5 response tokens"):
        encode([trajectory(0, 5, test_weight=[1.0])])


def test_a_name_has_one_declaration() -> None:
    registry = StreamRegistry(Stream("a", "One."))
    registry.declare(Stream("a", "One."))
    with pytest.raises(ValueError, match="'a' is declared already"):
        registry.declare(Stream("a", "Another."))
    with pytest.raises(KeyError, match="stream 'b' is not declared; declared are a"):
        registry["b"]
    assert [stream for stream in STREAMS.from_rollout if not stream.optional] == list(EVERY_DTYPE)


def test_the_loss_uses_the_declared_names() -> None:
    """The layers forbid `algorithms` to import `queue`, so the loss writes the names out."""
    used = stream_names((ROOT / "megarl/algorithms/objective/objective.py").read_text())
    assert used == {OLD_LOGPROBS, ADVANTAGES, ROLLOUT_LOGPROBS}
    assert Objective.reference_stream == REFERENCE_LOGPROBS
    assert WEIGHT_STREAMS == (RL_WEIGHTS, CE_WEIGHTS, REF_KL_WEIGHTS)
    assert {*used, REFERENCE_LOGPROBS, *WEIGHT_STREAMS} <= {stream.name for stream in STREAMS}
    assert stream_names("streams['a'] + inputs.streams.get('b') + other['c']") == {"a", "b"}


def stream_names(source: str) -> set[str]:
    """Return the constant keys by which a module reads a mapping that is called `streams`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("streams"):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("streams.get"):
            keys = node.args[:1]
        else:
            continue
        found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return found
