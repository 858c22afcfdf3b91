"""The expert bias is fp32 in every checkpoint, whatever the files and `--dtype` say; `verify` compares its values."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints.converter import convert, run
from tests.support.models.tensors import read_hf

BIAS = "e_score_correction_bias"


def _with(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_bf16_bias_comes_back_as_fp32_of_the_same_values(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = _with(
        model_dir("deepseek_v3"), tmp_path / "bf16", lambda ts: ts.update({n: t.bfloat16() for n, t in ts.items()})
    )
    convert("import", "--hf", source, "--out", tmp_path / "m")
    convert("export", "--megatron", tmp_path / "m", "--hf", tmp_path / "back")
    before, after = read_hf(source), read_hf(tmp_path / "back")
    assert before.keys() == after.keys() and sum(BIAS in name for name in after) == 3
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if BIAS in name else torch.bfloat16)
        assert torch.equal(tensor, before[name].to(tensor.dtype))
    for other in (tmp_path / "m", tmp_path / "back"):
        assert f"{len(before)} equal, 0 differing, 0 of another shape or dtype" in convert("verify", source, other)


def test_verify_sees_another_value_and_another_dtype_of_a_weight(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    plain, name = model_dir("deepseek_v3"), f"model.layers.2.mlp.gate.{BIAS}"
    rounded = _with(plain, tmp_path / "rounded", lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    code, out, _ = run("verify", plain, rounded)
    assert code == 1 and "1 of another shape or dtype" in out and f"{name}: [8] float32 and [8] bfloat16" in out
    norm = "model.norm.weight"
    ones = _with(plain, tmp_path / "ones", lambda tensors: tensors.update({norm: torch.ones_like(tensors[norm])}))
    halves = _with(ones, tmp_path / "halves", lambda tensors: tensors.update({norm: tensors[norm].bfloat16()}))
    code, out, _ = run("verify", ones, halves)
    assert code == 1 and "1 of another shape or dtype" in out and f"{norm}: [64] float32 and [64] bfloat16" in out


def test_dtype_rounds_all_but_the_bias(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    source = model_dir("deepseek_v3")
    convert("import", "--hf", source, "--out", tmp_path / "half", "--dtype", "bfloat16")
    convert("export", "--megatron", tmp_path / "half", "--hf", tmp_path / "imported")
    convert("import", "--hf", source, "--out", tmp_path / "full")
    convert("export", "--megatron", tmp_path / "full", "--hf", tmp_path / "exported", "--dtype", "bfloat16")
    before = read_hf(source)
    for directory in (tmp_path / "imported", tmp_path / "exported"):
        after = read_hf(directory)
        assert before.keys() == after.keys()
        for name, tensor in after.items():
            expected = before[name] if BIAS in name else before[name].bfloat16()
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
