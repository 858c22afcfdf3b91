"""Tensors by name: read from Hugging Face files, joined from several ranks, compared."""

from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def read_hf(directory: Path) -> Tensors:
    """All tensors of the safetensors files of a directory."""
    return merge([load_file(file) for file in sorted(directory.glob("*.safetensors"))])


def merge(parts: list[Tensors]) -> Tensors:
    """Each tensor from its one owner."""
    merged: Tensors = {}
    for part in parts:
        assert not merged.keys() & part.keys(), "a tensor has two owners"
        merged |= part
    return merged


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, and equal bytes: NaN is equal to NaN, and 0 is not equal to -0."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def differing(one: Path, other: Path) -> list[str]:
    """Names of tensors that are not the same bits in both directories."""
    a, b = read_hf(one), read_hf(other)
    return [
        name for name in sorted(a.keys() | b.keys()) if not (name in a and name in b and same_bits(a[name], b[name]))
    ]


def worst(got: Tensors, expected: Tensors, scale: Tensors | None = None) -> float:
    """Largest ||got - expected|| / ||scale or expected|| over all tensors; NaN if one of them is."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    scale = scale or expected
    ratios = []
    for name, value in expected.items():
        size = float(scale[name].norm())
        assert size > 0, f"{name}: nothing to compare with"
        ratios.append(float((got[name] - value).norm()) / size)
    return float(torch.tensor(ratios, dtype=torch.float64).max())  # Python's max would pass over NaN
