"""A model's files quantised as publishers do it, and the plain files that they stand for, by arithmetic of its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.tiny import make_tiny_model

Tensors = dict[str, torch.Tensor]
FP8_BLOCK = (24, 40)  # neither divides the matrices of the tiny models, so that last blocks are partial
INT4_GROUP = 32
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [*FP8_BLOCK],
}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": INT4_GROUP,
                "actorder": None,
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def fp8(weight: torch.Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values float8_e4m3fn, scales fp32 and the fp32 matrix that they stand for, block by block."""
    rows, columns = weight.shape
    values, plain = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[place] = values[place].float() * scales[i, j]
    return values, scales, plain


def int4(weight: torch.Tensor, group: int = INT4_GROUP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed values int32, scales bf16 and the fp32 matrix that they stand for, word by word."""
    rows, columns = weight.shape
    scales = (weight.view(rows, -1, group).abs().amax(2) / 7).to(torch.bfloat16)
    values = (weight.view(rows, -1, group) / scales[..., None].float()).round().clamp(-8, 7).long().view(rows, columns)
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for column in range(columns):
        packed[:, column // 8] += (values[:, column] + 8) << 4 * (column % 8)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    plain = torch.stack([values[:, column] * scales[:, column // group].float() for column in range(columns)], 1)
    return packed.to(torch.int32), scales, plain


def _fp8_parts(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scales, plain = fp8(weight)
    return {f"{module}.weight": values, f"{module}.weight_scale_inv": scales}, plain


def _int4_parts(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    packed, scales, plain = int4(weight)
    shape = torch.tensor(weight.shape)
    return {f"{module}.weight_packed": packed, f"{module}.weight_scale": scales, f"{module}.weight_shape": shape}, plain


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") or ".kv_a_proj_with_mqa." in name or ".q_b_proj." in name


# By form: what config.json says, what is quantised, and how.
Parts = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool], Parts]] = {
    "fp8": (FP8, _is_linear, _fp8_parts),
    "int4": (INT4, lambda name: ".experts." in name, _int4_parts),
}


def quantized_model(root: Path, family: str, form: str, **dims: object) -> tuple[Path, Path]:
    """Write a tiny model to `root`/quantised and `root`/plain; return both. Groups divide its experts' columns."""
    root.mkdir(exist_ok=True)
    source = make_tiny_model(root / "source", family, **{"num_hidden_layers": 4, "moe_intermediate_size": 64} | dims)
    return quantize(source, root, form)


def quantize(source: Path, root: Path, form: str) -> tuple[Path, Path]:
    """Write `root`/quantised in two files, values and scales apart, and `root`/plain; return both directories."""
    settings, chosen, parts = FORMS[form]
    files: tuple[Tensors, Tensors] = {}, {}
    plain = load_file(source / "model.safetensors")
    for name, tensor in list(plain.items()):
        if not chosen(name):
            files[0][name] = tensor
            continue
        made, plain[name] = parts(name.removesuffix(".weight"), tensor)
        for each, value in made.items():
            files["scale" in each][each] = value
    for directory in (root / "quantised", root / "plain"):
        shutil.copytree(source, directory)
    edit_config(root / "quantised", {"quantization_config": settings})
    save_file(plain, root / "plain/model.safetensors", {"format": "pt"})
    (root / "quantised/model.safetensors").unlink()
    names = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for file, tensors in zip(names, files, strict=True):
        save_file(tensors, root / "quantised" / file, {"format": "pt"})
    index = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    (root / "quantised/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return root / "quantised", root / "plain"


def edit_config(directory: Path, changed: dict[str, Any]) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a quantised model, which become one file."""
    tensors = {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}
    change(tensors)
    for file in (*directory.glob("*.safetensors"), directory / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
