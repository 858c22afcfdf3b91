"""Reads a model's `config.json` into `ModelInfo`."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.rope import KINDS, attention_factor, read_rope, rotary_share
from megarl.models.families import FAMILIES
from megarl.models.families.base import Family
from megarl.models.hf.model_files import hf_files


def load_info(model_dir: Path | str) -> ModelInfo:
    """Read the `config.json` of a Hugging Face directory or a Megatron checkpoint, with old or new key names.

    Raises ValueError that names file and field, for a missing directory, an unknown architecture, or a feature that
    cannot be ignored without silently wrong results.
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
        # Errors other than ValueError and KeyError come from the first use of a field of the wrong type or a size of 0.
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        page = "; docs/training/models.md lists what works" if "not supported" in what else ""
        raise ValueError(f"{path}: {what}{page}") from error


# Far beyond any model. Larger sizes would exhaust the memory at their first use.
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

    Raises ValueError for unsupported features, KeyError for a missing key, and whatever a field of the wrong type
    causes; `load_info` turns all of them into a ValueError that names the file.
    """
    names = raw.get("architectures") or []
    family = family_of(raw)
    if family is None:
        supported = ", ".join(f.architecture for f in FAMILIES.values())
        if not names:
            raise ValueError(f"'architectures' is missing; set it to a list with one of: {supported}")
        raise ValueError(f"architecture {names} is not supported: no family has {', '.join(_unknown(raw))}")
    given, raw = raw, {**family.defaults, **family.language(raw)}
    _refuse(raw)
    read_quantization(given)
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
    if fields.get("rotary_dim", fields["head_dim"]) != fields["head_dim"] and attention_factor(scaling) != 1:
        raise ValueError("YaRN with partial_rotary_factor is not supported")  # its factor applies to whole heads
    return ModelInfo(**fields)


def _unknown(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of the parts of an unknown architecture that its config names."""
    text = {**raw, **(raw.get("text_config") or {})}
    kinds = sorted({str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()})
    if text.get("hybrid_override_pattern") or any(key.startswith(("mamba_", "ssm_")) for key in text):
        kinds.append("state space")
    if kinds and kinds != ["full_attention"]:
        yield f"its layers ({', '.join(kinds)})"
    experts = next((text[key] for key in _EXPERTS if text.get(key)), None)
    if experts:
        yield f"its router of {experts} experts"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in KINDS:
        yield f"its RoPE ({kind})"
    yield "its names of tensors"


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """Return the family of a parsed `config.json`, by its `architectures`; None if it is not supported."""
    names = set(raw.get("architectures") or ()) - {""}
    return next((f for f in FAMILIES.values() if {f.architecture, f.sees} & names), None)


def sees(raw: Mapping[str, Any]) -> bool:
    """Return whether a model has a vision tower that its family uses."""
    family = family_of(raw)
    return bool(raw.get("vision_config")) and (family is None or family.architecture in raw["architectures"])


def _with_pixels(info: ModelInfo, directory: Path) -> ModelInfo:
    """Return `info` with the mean and std of the directory's image processor; without its file, the family's."""
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
    """Return the longest sequence, as in vLLM: only linear scaling extends config.json's value."""
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


_REMEDY = (
    "supported: fp8 with weight_block_size, and compressed-tensors pack-quantized (4 bits, symmetric, groups); use "
    "such files or bf16 files"
)


@dataclass(frozen=True)
class Quantization:
    """How files quantise their matrices. `block`: rows and columns that share a scale; `dtype`: after dequantising."""

    packed: bool  # INT4, else FP8
    block: tuple[int, int]
    dtype: str
    plain: tuple[str, ...] = ()  # modules that are not quantised: names, or `re:` and a pattern

    def __str__(self) -> str:
        what = f"INT4 in groups of {self.block[1]}" if self.packed else "FP8 in blocks of {} x {}".format(*self.block)
        return f"{what}, read as {self.dtype}"


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """Return how the files of a parsed `config.json` quantise; None if they do not.

    Raises ValueError naming an unsupported form.
    """
    if (raw.get("text_config") or {}).get("quantization_config"):
        raise ValueError("text_config.quantization_config is not read; move it to the top level")
    given = raw.get("quantization_config")
    if not given:
        return None
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype={name!r} is not one that quantised weights can be read as; use bfloat16")
    method = given.get("quant_method")
    if method == "fp8":
        return _fp8(given, name)
    if method == "compressed-tensors":
        return _int4(given, name)
    raise ValueError(f"quantised weights of quant_method={method!r} are not supported; {_REMEDY}")


def _fp8(given: Mapping[str, Any], dtype: str) -> Quantization:
    _require("fp8", given, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)})
    block = given.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ValueError(f"fp8 weights with weight_block_size={block!r} are not supported; {_REMEDY}")
    return Quantization(False, (block[0], block[1]), dtype, _names(given, "modules_to_not_convert"))


def _int4(given: Mapping[str, Any], dtype: str) -> Quantization:
    _require("compressed-tensors", given, {"format": ("pack-quantized",), "transform_config": (None, {})})
    groups = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    for weights in groups:
        wanted = {"num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",), "actorder": (None,)}
        _require("compressed-tensors", weights, wanted)
    sizes = {weights.get("group_size") for weights in groups}
    size = sizes.pop() if len(sizes) == 1 else None
    if type(size) is not int or size < 1:
        raise ValueError(f"compressed-tensors weights without one group_size are not supported; {_REMEDY}")
    return Quantization(True, (1, size), dtype, _names(given, "ignore"))


def _require(method: str, given: Mapping[str, Any], supported: Mapping[str, tuple[object, ...]]) -> None:
    for key, values in supported.items():
        if given.get(key) not in values:
            raise ValueError(f"{method} weights with {key}={given.get(key)!r} are not supported; {_REMEDY}")


def _names(given: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = tuple(str(name) for name in given.get(key) or ())
    try:
        for name in names:
            re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{key}: {name!r} is not a pattern: {error}") from None
    return names
