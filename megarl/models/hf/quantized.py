"""Dequantises matrices of published files: FP8 with block scales, and INT4 in groups.

FP8 (`quant_method: fp8`): `X.weight` [R, C], and `X.weight_scale_inv`, which despite its name holds each block's
multiplier. INT4 (`compressed-tensors`, `pack-quantized`): `X.weight_packed` int32 [R, C / 8], whose nibble i from the
low end of word w is column 8 w + i stored as value + 8; `X.weight_scale` [R, C / group]; `X.weight_shape` [2].

The block size is the config's, not the ratio of the two shapes: the last block in each direction may be partial. The
product is computed in fp32 and rounded once.

Shapes: R rows, C columns of a part of a matrix.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.models.hf.read_config import Quantization
from megarl.models.hf.safetensors import DTYPE_NAMES, DTYPES, TensorRecord

SLAB_ROWS = 256  # rows in fp32 at once
_SCALES = ("F32", "BF16", "F16")
_WORD = 8  # values of 4 bits in an int32
ReadRows = Callable[[TensorRecord, torch.dtype, int, int], torch.Tensor]  # read-only rows [start, stop) of a tensor


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantised matrix in the files; `stated`: the tensor that repeats the shape."""

    values: TensorRecord
    scales: TensorRecord
    stated: TensorRecord | None
    shape: tuple[int, int]
    form: Quantization


def quantized_matrices(
    records: dict[str, TensorRecord], form: Quantization | None
) -> tuple[dict[str, TensorRecord], dict[str, QuantizedMatrix]]:
    """Return the files' tensors with plain matrices in place of quantised ones, and the quantised ones by name.

    Raises ValueError that names the tensor: scales without values, other shapes or dtypes than the form's, or quantised
    modules that the config lists as not quantised.
    """
    if form is None:
        return records, {}
    plain, found, dtype = dict(records), {}, getattr(torch, form.dtype)
    values_end, scales_end = ("weight_packed", "weight_scale") if form.packed else ("weight", "weight_scale_inv")
    for name, record in records.items():
        module, _, end = name.rpartition(".")
        if end != scales_end:
            continue
        parts = [f"{module}.{each}" for each in (values_end, scales_end, "weight_shape")[: 3 if form.packed else 2]]
        if missing := [each for each in parts if each not in records]:
            raise ValueError(f"{name} in {record.file} is a quantised matrix's, but there is no {missing[0]}")
        if any(_names(listed, module) for listed in form.plain):
            raise ValueError(f"{name} in {record.file}: config.json lists {module} as not quantised")
        values, scales, *stated = (plain.pop(each) for each in parts)
        shape = _shape(module, values, scales, form)
        if f"{module}.weight" in plain:
            raise ValueError(f"{module}.weight in {plain[f'{module}.weight'].file} is next to {parts[0]}")
        plain[f"{module}.weight"] = TensorRecord(values.file, DTYPE_NAMES[dtype], shape, values.begin, values.end)
        found[f"{module}.weight"] = QuantizedMatrix(values, scales, stated[0] if stated else None, shape, form)
    return plain, found


def _names(listed: str, module: str) -> bool:
    return re.match(listed[3:], module) is not None if listed.startswith("re:") else listed == module


def _shape(module: str, values: TensorRecord, scales: TensorRecord, form: Quantization) -> tuple[int, int]:
    if values.dtype != ("I32" if form.packed else "F8_E4M3") or len(values.shape) != 2 or scales.dtype not in _SCALES:
        found = f"{values.dtype} {list(values.shape)} with scales in {scales.dtype}"
        raise ValueError(f"{module} in {values.file}: {found} is not {form}")
    rows, columns = values.shape[0], values.shape[1] * (_WORD if form.packed else 1)
    grid = (-(-rows // form.block[0]), -(-columns // form.block[1]))
    if scales.shape != grid:
        raise ValueError(
            f"{module} in {values.file}: scales {list(scales.shape)}, but {rows} x {columns} values have {list(grid)} "
            f"({form})"
        )
    return rows, columns


def dequantized(
    matrix: QuantizedMatrix, read: ReadRows, start: int, stop: int, columns: tuple[int, int] | None
) -> torch.Tensor:
    """Return rows [start, stop) of a matrix, or only `columns` of them: [R, C] in the form's dtype.

    At most SLAB_ROWS are in fp32 at once. Raises ValueError if the files state another shape.
    """
    if matrix.stated is not None:
        shape = read(matrix.stated, DTYPES[matrix.stated.dtype], 0, matrix.stated.shape[0]).tolist()
        if shape != list(matrix.shape):
            raise ValueError(f"a weight_shape in {matrix.stated.file} is {shape}, its values {list(matrix.shape)}")
    first, last = columns or (0, matrix.shape[1])
    (height, width), scale_dtype = matrix.form.block, DTYPES[matrix.scales.dtype]
    scales = read(matrix.scales, scale_dtype, start // height, -(-stop // height))
    columns_C = torch.arange(first, last) // width
    out_RC = torch.empty((stop - start, last - first), dtype=getattr(torch, matrix.form.dtype))
    for low in range(start, stop, SLAB_ROWS):
        high = min(low + SLAB_ROWS, stop)
        rows_R = torch.arange(low, high) // height - start // height
        scales_RC = scales[rows_R[:, None], columns_C].float()
        out_RC[low - start : high - start] = _values(matrix, read, low, high, first, last) * scales_RC
    return out_RC


def _values(matrix: QuantizedMatrix, read: ReadRows, low: int, high: int, first: int, last: int) -> torch.Tensor:
    """Return the values without scales, fp32 [R, C]."""
    if not matrix.form.packed:
        return read(matrix.values, torch.float8_e4m3fn, low, high)[:, first:last].float()
    words = read(matrix.values, torch.int32, low, high)[:, first // _WORD : -(-last // _WORD), None]
    nibbles = (words >> torch.arange(0, 32, 4, dtype=torch.int32)) & 0xF
    return (nibbles.flatten(1)[:, first % _WORD :][:, : last - first] - 8).float()
