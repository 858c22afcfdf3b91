"""Published quantised files become plain weights on import, and stay so."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.cli import main
from megarl.models.hf import directory as hf_directory
from megarl.models.hf import quantized
from megarl.models.hf.quantized import QuantizedMatrix
from tests.support.checkpoints.converter import convert, refused, run_forked
from tests.support.models.quantized import edit_config, edit_tensors, quantized_model
from tests.support.models.tensors import differing

# Kimi's shape: DeepSeek's layers without groups of experts; INT4 is of its experts alone.
KIMI = {"n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "deepseek_v3-fp8": ("deepseek_v3", "fp8", {}),
    "qwen3_moe-fp8": ("qwen3_moe", "fp8", {}),
    "kimi-int4": ("deepseek_v3", "int4", KIMI),
}
TEXT = ("--logits", "--text", "1 + 1 = 2, and so on", "--tolerance", 1e-5)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A quantised model, and the plain one that it stands for."""
    family, form, dims = MODELS[request.param]
    return quantized_model(tmp_path, family, form, **dims)


def test_import_verify_export(model: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, plain = model
    convert("import", "--hf", quantised, "--out", tmp_path / "m")
    for one in model:
        assert "0 differing, 0 of another shape or dtype, 0 missing, 0 unexpected" in convert(
            "verify", one, tmp_path / "m"
        )
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "back")
    assert differing(plain, tmp_path / "back") == []
    for written in (tmp_path / "m/release/hf", tmp_path / "back"):
        assert "quantization_config" not in json.loads((written / "config.json").read_text())


@pytest.mark.parametrize("model", ["deepseek_v3-fp8", "kimi-int4"], indirect=True)
def test_log_probs_are_those_of_transformers(model: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, plain = model
    convert("import", "--hf", quantised, "--out", tmp_path / "m")
    for one, other in ((plain, tmp_path / "m"), (quantised, plain)):
        log = tmp_path / "log"
        assert run_forked("verify", one, other, *TEXT, stdout=log) == 0, log.read_text()
        assert "within 1e-05" in log.read_text()


@pytest.mark.parametrize("model", ["deepseek_v3-fp8"], indirect=True)
def test_inspect_names_the_form(model: tuple[Path, Path]) -> None:
    quantised, plain = model
    assert "FP8 in blocks of 24 x 40, read as float32" in convert("inspect", quantised)
    assert "quantised" not in convert("inspect", plain).replace(str(plain), "")


@pytest.mark.parametrize("model", ["kimi-int4"], indirect=True)
def test_dtypes_follow_the_config(model: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, _ = model
    edit_config(quantised, {"dtype": "bfloat16"})
    edit_tensors(
        quantised,
        lambda tensors: tensors.update(
            {n: t.bfloat16() for n, t in tensors.items() if n.endswith((".weight", ".bias")) and t.is_floating_point()}
        ),
    )
    convert("import", "--hf", quantised, "--out", tmp_path / "m")
    assert "INT4 in groups of 32, read as bfloat16" in convert("inspect", quantised)
    assert "0 differing, 0 of another" in convert("verify", quantised, tmp_path / "m")


@pytest.mark.parametrize("model", ["deepseek_v3-fp8"], indirect=True)
def test_a_predicting_layer_is_left_out_with_its_scales(model: tuple[Path, Path], tmp_path: Path) -> None:
    quantised, plain = model
    extra = {
        "model.layers.4.eh_proj.weight": torch.ones(30, 50).to(torch.float8_e4m3fn),
        "model.layers.4.eh_proj.weight_scale_inv": torch.ones(2, 2),
    }
    edit_tensors(quantised, lambda tensors: tensors.update(extra))
    edit_config(quantised, {"num_nextn_predict_layers": 1})
    said = convert("import", "--hf", quantised, "--out", tmp_path / "m")
    assert "left out: 1 tensors of the multi-token prediction layer model.layers.4.*" in said
    assert "0 differing" in convert("verify", plain, tmp_path / "m")


def test_commands_with_engines_alone_refuse_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised, _ = quantized_model(tmp_path, "qwen3_moe", "fp8")
    data = tmp_path / "data.jsonl"
    data.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    assert main.main(["eval", "--model", str(quantised), "--data", str(data), "--reward", "math"]) == 2
    said = capsys.readouterr().err
    assert (
        "holds quantised weights" in said and f"import --hf {quantised} --out DIR, then export --megatron DIR" in said
    )


def test_another_form_is_refused_in_one_line(tmp_path: Path) -> None:
    quantised, _ = quantized_model(tmp_path, "qwen3_moe", "fp8")
    edit_config(quantised, {"quantization_config": {"quant_method": "awq", "bits": 4}})
    said = refused("import", "--hf", quantised, "--out", tmp_path / "m")
    assert "quant_method='awq'" in said and "fp8 with weight_block_size" in said and said.count("\n") == 1


def _divided(matrix: QuantizedMatrix, read: Any, *place: Any) -> torch.Tensor:
    def inverse(record: Any, dtype: torch.dtype, *rows: int) -> torch.Tensor:
        found: torch.Tensor = read(record, dtype, *rows)
        return 1 / found if record is matrix.scales else found

    return DEQUANTIZED(matrix, inverse, *place)


def _by_grid(matrix: QuantizedMatrix, *rest: Any) -> torch.Tensor:
    sizes = [-(-size // count) for size, count in zip(matrix.shape, matrix.scales.shape, strict=True)]
    return DEQUANTIZED(replace(matrix, form=replace(matrix.form, block=(sizes[0], sizes[1]))), *rest)


def _from_the_high_end(matrix: QuantizedMatrix, read: Any, low: int, high: int, first: int, last: int) -> torch.Tensor:
    values = VALUES(matrix, read, low, high, first, last)
    return values.view(high - low, -1, 8).flip(2).flatten(1)


DEQUANTIZED, VALUES = quantized.dequantized, quantized._values
MISTAKES: dict[str, tuple[str, object, str, Callable[..., torch.Tensor]]] = {
    "scale divides": ("deepseek_v3-fp8", hf_directory, "dequantized", _divided),
    "block from the grid": ("deepseek_v3-fp8", hf_directory, "dequantized", _by_grid),
    "nibble order": ("kimi-int4", quantized, "_values", _from_the_high_end),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_mistakes(mistake: str, tmp_path: Path) -> None:
    name, module, function, wrong = MISTAKES[mistake]
    family, form, dims = MODELS[name]
    quantised, plain = quantized_model(tmp_path, family, form, **dims)
    with mock.patch.object(module, function, wrong):
        convert("import", "--hf", quantised, "--out", tmp_path / "m")
    log = tmp_path / "log"
    assert run_forked("verify", plain, tmp_path / "m", *TEXT[:-1], 1e-4, stdout=log) == 1
    assert "ABOVE 1e-04" in log.read_text(), log.read_text()
