"""Rotary position embeddings as `config.json` states them: base, scaling, inverse frequencies, attention factor.

Computed here, not by Megatron-Core: it hard-codes three of Llama 3's four scaling numbers
(rotary_pos_embedding.py:96), and with packed sequences its fused RoPE drops YaRN's attention factor
(rope_utils.py:296). Source of the formulas: `transformers` modeling_rope_utils; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = ("default", "linear", "llama3", "yarn")
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}


def read_rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """RoPE base and scaling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    The scaling is None for plain RoPE, else {"rope_type": …, "factor": …, …} with every number the formulas need.
    Raises ValueError for an unknown kind, a missing number, or two keys that say different things.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    found = _read(new or old or {}, raw)
    # transformers would take the old key; whoever added it to a new file may have meant either.
    if new and old and _read(old, raw) != found:
        raise ValueError("rope_parameters and rope_scaling say different things; keep one of them")
    return found


def _read(given: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    parameters = dict(given)
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"rope_parameters of each kind of attention ({', '.join(nested)}) are not supported")
    if parameters.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind not in KINDS:
        raise ValueError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if kind == "default":
        return theta, None
    missing = [name for name in _NEEDED[kind] if parameters.get(name) is None]
    if missing:
        raise ValueError(f"RoPE scaling {kind!r} needs {', '.join(missing)}")
    if kind in ("llama3", "yarn"):
        original = int(parameters.get("original_max_position_embeddings") or raw["max_position_embeddings"])
        # transformers reads it inside only; whoever wrote it outside meant it to be read.
        if raw.get("original_max_position_embeddings", original) not in (original, None):
            raise ValueError("original_max_position_embeddings must be inside rope_parameters (or rope_scaling)")
        parameters["original_max_position_embeddings"] = original
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = raw["max_position_embeddings"] / parameters["original_max_position_embeddings"]
    return theta, {"rope_type": kind, **parameters}


def inverse_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """RoPE inverse frequencies, fp32 [dim / 2], of `dim` rotated channels per head."""
    import torch  # not at the top: the dry-run plan reads configs without it

    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (theta**exponents)
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    if scaling["rope_type"] == "yarn":
        kept = _yarn_kept(dim, theta, scaling)
        return frequencies / factor * (1 - kept) + frequencies * kept
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn_kept(dim: int, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Per frequency, 1 where YaRN leaves it as it is, 0 where it interpolates; a ramp between. fp32 [dim / 2]."""
    import torch

    original = scaling["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    return 1 - ramp.clamp(0.0, 1.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context, 0.1 · mscale · ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What YaRN multiplies rotated queries and keys by; 1 for every other kind."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)
