"""Quantised matrices are read as exactly the ones that they stand for, and other forms are refused by name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize

from megarl.models.hf.directory import HFDirectory
from megarl.models.hf.quantized import SLAB_ROWS, dequantized, quantized_matrices
from megarl.models.hf.read_config import load_info, read_quantization
from megarl.models.hf.safetensors import DTYPE_NAMES, TensorRecord
from tests.support.measures.live_bytes import LiveBytes
from tests.support.models.quantized import (
    FORMS,
    FP8,
    INT4,
    Tensors,
    edit_config,
    edit_tensors,
    fp8,
    int4,
    quantized_model,
)

NAMES = DTYPE_NAMES | {torch.float8_e4m3fn: "F8_E4M3"}
WINDOWS = [((0, None), None), ((100, 131), (7, 130)), ((3, 4), (129, 131)), ((127, None), (0, 8))]


def read(tensors: Tensors, settings: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Return a function from rows and columns to that part of the matrix `m` that the tensors stand for."""
    records = {
        name: TensorRecord(Path(name), NAMES[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    plain, matrices = quantized_matrices(records, read_quantization({"quantization_config": settings}))
    assert list(plain) == ["m.weight"]

    def part(start: int, stop: int | None, columns: tuple[int, int] | None) -> torch.Tensor:
        end = plain["m.weight"].shape[0] if stop is None else stop
        return dequantized(
            matrices["m.weight"], lambda record, _, a, b: tensors[str(record.file)][a:b], start, end, columns
        )

    return part


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(256, 384), (576, 256), (200, 300)])
def test_fp8_is_the_product_in_fp32_rounded_once(size: tuple[int, int], scales_dtype: torch.dtype) -> None:
    """576 rows have 5 rows of scales, 200 have 2: the last block of 128 is partial."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values, scales, _ = fp8(weight, (128, 128))
    scales = scales.to(scales_dtype)
    part = read({"m.weight": values, "m.weight_scale_inv": scales}, FP8 | {"weight_block_size": [128, 128]})
    wanted = torch.empty(size, dtype=torch.bfloat16)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            wanted[place] = (values[place].float() * scales[i, j].float()).to(torch.bfloat16)
    for (start, stop), columns in WINDOWS:
        rows = part(start, stop, columns)
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, wanted[start:stop, slice(*columns or (None, None))])


def test_int4_is_what_its_own_library_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (300, 160), dtype=torch.int8, generator=generator)
    scales = (torch.rand(300, 5, generator=generator) * 0.02).to(torch.bfloat16)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    wanted = dequantize(values, scales, args=args, dtype=torch.bfloat16)
    tensors = {"m.weight_packed": pack_to_int32(values, 4), "m.weight_scale": scales}
    part = read(tensors | {"m.weight_shape": torch.tensor([300, 160])}, INT4)
    for (start, stop), columns in WINDOWS:
        assert torch.equal(part(start, stop, columns), wanted[start:stop, slice(*columns or (None, None))])


def test_the_support_packs_as_the_library() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    packed, scales, plain = int4(weight)
    assert torch.equal(packed, pack_to_int32((plain / scales.float().repeat_interleave(32, 1)).round().char(), 4))


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_than_a_slab_is_in_fp32(packed: bool) -> None:
    rows, columns = 32 * SLAB_ROWS, 256
    if packed:
        tensors = {"m.weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32)}
        tensors |= {"m.weight_scale": torch.ones(rows, columns // 32), "m.weight_shape": torch.tensor([rows, columns])}
    else:
        scales = torch.ones(-(-rows // 24), -(-columns // 40))
        tensors = {"m.weight": torch.zeros(rows, columns).to(torch.float8_e4m3fn), "m.weight_scale_inv": scales}
    part = read(tensors, INT4 if packed else FP8)
    with LiveBytes() as live:
        matrix = part(0, None, None)
    assert live.peak <= 2 * matrix.nbytes < rows * columns * 4 + matrix.nbytes


@pytest.fixture
def quantised(tmp_path: Path) -> Callable[[str], Path]:
    return lambda form: quantized_model(tmp_path, {"fp8": "deepseek_v3", "int4": "qwen3_moe"}[form], form)[0]


Q_PROJ = "model.layers.1.self_attn.o_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"), f"{Q_PROJ}.weight in"),
        ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight"), f"there is no {Q_PROJ}.weight"),
        ("fp8", lambda t: t.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(3, 1)}), "64 x 48 values have [3, 2]"),
        ("int4", lambda t: t.pop(f"{EXPERT}.weight_shape"), f"there is no {EXPERT}.weight_shape"),
        ("int4", lambda t: t.update({f"{EXPERT}.weight": torch.ones(64, 64)}), f"is next to {EXPERT}.weight_packed"),
        ("int4", lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(64, 1)}), "64 x 64 values have [64, 2]"),
        ("int4", lambda t: t.update({f"{EXPERT}.weight_zero_point": torch.ones(8, 2)}), f"{EXPERT}.weight_zero_point"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    form: str, change: Callable[[Tensors], object], message: str, quantised: Callable[[str], Path]
) -> None:
    directory = quantised(form)
    edit_tensors(directory, change)
    with pytest.raises(ValueError, match="(?s)" + re.escape(message)):
        HFDirectory(directory)


def test_another_shape_than_stated_is_refused(quantised: Callable[[str], Path]) -> None:
    directory = quantised("int4")
    edit_tensors(directory, lambda tensors: tensors.update({f"{EXPERT}.weight_shape": torch.tensor([64, 60])}))
    with pytest.raises(ValueError, match=r"weight_shape in .* is \[64, 60\], its values \[64, 64\]"):
        HFDirectory(directory).rows(f"{EXPERT}.weight", 0, 1)


@pytest.mark.parametrize(
    ("form", "key", "name"), [("fp8", "modules_to_not_convert", Q_PROJ), ("int4", "ignore", r"re:.*experts\.2\.up")]
)
def test_a_module_that_is_listed_as_plain_and_is_not(
    form: str, key: str, name: str, quantised: Callable[[str], Path]
) -> None:
    directory = quantised(form)
    edit_config(directory, {"quantization_config": FORMS[form][0] | {key: [name]}})
    with pytest.raises(ValueError, match="as not quantised"):
        HFDirectory(directory)


def group(**changed: object) -> dict[str, Any]:
    weights = INT4["config_groups"]["group_0"]["weights"]
    return INT4 | {"config_groups": {"group_0": {"weights": weights | changed}}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"quant_method": name}, f"quant_method='{name}'") for name in ("awq", "gptq", "mxfp4", "bitsandbytes")),
        ({"bits": 4}, "quant_method=None"),
        (FP8 | {"weight_block_size": None}, "weight_block_size=None"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme='static'"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (INT4 | {"format": "float-quantized"}, "format='float-quantized'"),
        (group(symmetric=False), "symmetric=False"),
        (group(strategy="channel"), "strategy='channel'"),
        (group(num_bits=8), "num_bits=8"),
        (group(actorder="group"), "actorder='group'"),
        (group(group_size=None), "without one group_size"),
        (INT4 | {"ignore": ["re:("]}, "is not a pattern"),
    ],
)
def test_other_forms_are_refused_by_name(
    settings: dict[str, Any], named: str, quantised: Callable[[str], Path]
) -> None:
    directory = quantised("fp8")
    edit_config(directory, {"quantization_config": settings})
    with pytest.raises(ValueError) as error:
        load_info(directory)
    assert named in str(error.value) and str(directory / "config.json") in str(error.value)
