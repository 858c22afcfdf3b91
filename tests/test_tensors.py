"""The comparison of tensors by name sees what it must, whichever tensor has it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.models.tensors import worst

EXPECTED = {name: torch.ones(4) for name in ("first", "middle", "last")}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_largest_difference_of_any_tensor_counts(name: str) -> None:
    got = EXPECTED | {name: torch.full((4,), 1.5)}
    assert worst(got, EXPECTED) == pytest.approx(0.5)


@pytest.mark.parametrize("name", EXPECTED)
def test_nan_in_any_tensor_is_no_agreement(name: str) -> None:
    got = EXPECTED | {name: torch.tensor([1.0, math.nan, 1.0, 1.0])}
    assert not worst(got, EXPECTED) <= 1e6
