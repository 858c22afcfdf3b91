"""Reads a model's `config.json` into `ModelInfo`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.rope import read_rope, rotary_share
from megarl.models.families import FAMILIES
from megarl.models.hf.model_files import hf_files


def load_info(model_dir: Path | str) -> ModelInfo:
    """Read the `config.json` of a Hugging Face directory or a Megatron checkpoint, with old or new key names.

    Raises ValueError naming the file and the field for a missing directory, an unknown architecture, or a feature
    that would give silently wrong results if it were ignored.
    """
    path = hf_files(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{path} not found: a model is a Hugging Face directory with a config.json, or a Megatron checkpoint"
        )
    try:
        raw = json.loads(path.read_text())
        if not isinstance(raw, dict):
            raise ValueError("it must be a JSON object")
        return _with_pixels(info_from_config(raw), path.parent)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # The others come from a field of the wrong type, or a size of 0, at the first place that uses it.
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: {what}") from error


# Far beyond any model: a file that says more would take all memory where its sizes are used first.
_LARGEST = {
    "num_hidden_layers": 10**4,
    "hidden_size": 10**6,
    "intermediate_size": 10**7,
    "num_attention_heads": 10**5,
    "vocab_size": 10**8,
    "max_position_embeddings": 10**9,
}


def info_from_config(raw: Mapping[str, Any]) -> ModelInfo:
    """Return the ModelInfo of a parsed `config.json`.

    Raises ValueError for what is not supported, KeyError for a missing key, and whatever a field of the wrong type
    causes; `load_info` turns all of them into a ValueError that names the file.
    """
    names = raw.get("architectures") or []
    family = next((f for f in FAMILIES.values() if f.architecture in names), None)
    if family is None:
        supported = ", ".join(f.architecture for f in FAMILIES.values())
        if not names:
            raise ValueError(f"'architectures' is missing: write the model's own as a list; supported: {supported}")
        raise ValueError(f"architecture {names} is not supported; supported: {supported}")
    given, raw = raw, {**family.defaults, **family.language(raw)}
    _refuse(raw)
    for name, most in _LARGEST.items():
        if not 0 < int(raw[name]) <= most:
            raise ValueError(f"{name}={raw[name]!r} must be between 1 and {most}")
    theta, scaling = read_rope(raw)
    heads = int(raw["num_attention_heads"])
    fields: dict[str, Any] = {
        "family": family.name,
        "num_layers": int(raw["num_hidden_layers"]),
        "hidden": int(raw["hidden_size"]),
        "ffn": int(raw["intermediate_size"]),
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or raw["hidden_size"] // heads),
        "vocab_size": int(raw["vocab_size"]),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "qk_norm": False,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_positions": _positions(raw, scaling),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "raw": dict(given),
    }
    fields.update(family.read(raw))
    if "rotary_dim" not in fields and rotary_share(raw) != 1:
        raise ValueError("partial_rotary_factor other than 1 is not supported in this family")
    return ModelInfo(**fields)


def _with_pixels(info: ModelInfo, directory: Path) -> ModelInfo:
    """Return `info` with the mean and std of the directory's image processor; without its file, those of the family."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if info.vision is None or not (directory / name).is_file():
            continue
        found = json.loads((directory / name).read_text())
        own = found.get("image_processor", found)
        for key, wanted in (("do_normalize", True), ("do_rescale", True), ("rescale_factor", 1 / 255)):
            if own.get(key, wanted) != wanted:
                raise ValueError(f"{name}: {key}={own[key]!r} is not supported; supported: {wanted}")
        mean, std = own.get("image_mean", info.vision.mean), own.get("image_std", info.vision.std)
        return replace(info, vision=replace(info.vision, mean=tuple(mean), std=tuple(std)))
    return info


def _positions(raw: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> int:
    """Return the longest sequence, as vLLM has it: linear scaling extends what config.json says, other kinds do not."""
    positions = int(raw["max_position_embeddings"])
    linear = scaling is not None and scaling["rope_type"] == "linear"
    return int(positions * float(scaling["factor"])) if scaling is not None and linear else positions


def _refuse(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported; set it to false for full attention")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias=true is not supported")
    if raw.get("quantization_config"):
        raise ValueError(
            "quantized checkpoints are not supported; use the bf16 or fp32 weights. If these weights are bf16 or fp32 "
            "already, delete quantization_config"
        )
