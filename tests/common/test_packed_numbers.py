"""The bytes of numbers are those of `array`."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.values import packed


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_integers(values: list[int]) -> None:
    assert packed("i", values) == array("i", values).tobytes() == packed("i", array("i", values))
    assert packed("q", values) == array("q", values).tobytes() == packed("q", array("i", values))
    assert packed("b", [value % 2 for value in values]) == array("b", [value % 2 for value in values]).tobytes()


@given(st.lists(st.floats()))
def test_floats_also_those_that_float32_cannot_hold(values: list[float]) -> None:
    assert packed("d", values) == array("d", values).tobytes()
    assert packed("f", values) == array("f", values).tobytes()


def test_what_does_not_fit_is_refused_as_by_array() -> None:
    with pytest.raises(OverflowError):
        packed("i", [2**31])
    with pytest.raises(TypeError):
        packed("i", [0.5])
