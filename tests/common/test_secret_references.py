"""References are found at any depth, replaced by values, and nothing else is changed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.secret_references import literal_secrets, references, resolved

leaves = st.none() | st.booleans() | st.integers() | st.text()
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abc"), inner))


@given(values=st.dictionaries(st.sampled_from("abc"), trees))
def test_values_without_references_are_kept(values: dict[str, Any]) -> None:
    assert resolved(values, "k") == values and not list(references(values, "k"))


@given(path=st.lists(st.integers(0, 2) | st.sampled_from("abc"), max_size=5))
def test_a_reference_at_any_depth(path: list[int | str]) -> None:
    tree: Any = {"env": "MEGARL_TEST_SECRET"}
    expected: Any = "hidden"
    for step in reversed(path):
        tree, expected = ([tree], [expected]) if isinstance(step, int) else ({step: tree}, {step: expected})
    place = ".".join(["k", "x", *("0" if isinstance(step, int) else step for step in path)])
    assert list(references({"x": tree}, "k")) == [(place, "MEGARL_TEST_SECRET")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGARL_TEST_SECRET", "hidden")
        assert resolved({"x": tree}, "k") == {"x": expected}
        patch.delenv("MEGARL_TEST_SECRET")
        with pytest.raises(ValueError, match=rf"^{place}: the environment variable MEGARL_TEST_SECRET is not set"):
            resolved({"x": tree}, "k")


@pytest.mark.parametrize("value", [{"env": "A", "x": 1}, {"env": 3}, {"env": "not a name"}, {"ENV": "A"}, "env"])
def test_what_is_no_reference(value: object) -> None:
    assert resolved({"x": value}, "k") == {"x": value}


def test_an_argument_that_is_called_env() -> None:
    """The mapping of all arguments is no reference itself."""
    assert resolved({"env": "math"}, "reward.kwargs") == {"env": "math"}


def test_names_of_secrets() -> None:
    values = {"api_key": "x", "a": {"hf_token": "y", "stop_token": "</s>"}, "password": {"env": "P"}, "tokens": "z"}
    assert list(literal_secrets(values, "k")) == ["k.api_key", "k.a.hf_token"]
