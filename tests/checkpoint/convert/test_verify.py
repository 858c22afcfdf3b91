"""The comparison of two models, tensor by tensor."""

import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from megarl.checkpoint.convert import verify
from megarl.checkpoint.convert.verify import Comparison, compare
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry


class Model:
    """A model of one tensor, `HFTensors` as far as a comparison looks."""

    path, info = Path(), ModelInfo.__new__(ModelInfo)
    entries: ClassVar[dict[str, Entry]] = {}  # no buffers

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def names(self) -> list[str]:
        return ["t"]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_in_any_block_is_the_difference(row: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is one row here. Of a number and NaN, `max` returns whichever comes first."""
    split = verify.split
    monkeypatch.setattr(verify, "split", lambda *arguments: split(*arguments, limit=8))
    other = torch.arange(6, dtype=dtype).reshape(3, 2) + 1
    other[row, 1] = math.nan
    found = compare(Model(torch.zeros(3, 2)), Model(other))
    if dtype == torch.float32:
        assert [name for name, _ in found.differing] == ["t"] and math.isnan(found.differing[0][1])
    else:
        assert found.mismatched == ["t: [3, 2] float32 and [3, 2] float64, max |Δ| nan"]


def test_nan_is_listed_first() -> None:
    lines = Comparison(differing=[("a", 1.0), ("b", math.nan), ("c", 2.0)]).render().splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["b", "c", "a"]
