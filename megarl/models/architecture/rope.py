"""Rotary position embeddings (RoPE) of a `config.json`: base, scaling, inverse frequencies, attention factor.

Megatron-Core's own are not used: it hard-codes three of Llama 3's four scaling numbers (rotary_pos_embedding.py:96),
and its fused RoPE drops YaRN's attention factor with packed sequences (rope_utils.py:296). The formulas are those of
`transformers` modeling_rope_utils; YaRN is arXiv 2309.00071.

Shapes: F frequencies, one for each pair of rotated channels of a head.
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
    """Read RoPE's base and scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`.

    The scaling is None for plain RoPE, else {"rope_type": …, "factor": …, …} with every number that the formulas need.
    Raises ValueError for an unknown kind, a missing number, or two keys that contradict each other.
    """
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    found = _read(new or old or {}, raw)
    # transformers would use the old key; the file's author may have meant the new one.
    if new and old and _read(old, raw) != found:
        raise ValueError("rope_parameters and rope_scaling contradict each other; keep one of them")
    return found


def rotary_share(raw: Mapping[str, Any]) -> float:
    """Return `partial_rotary_factor`: the share of a head's channels, counted from the first, that RoPE rotates.

    Raises ValueError unless it is above 0 and at most 1.
    """
    places = (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}, raw)
    share = next((place["partial_rotary_factor"] for place in places if place.get("partial_rotary_factor")), 1.0)
    if not 0 < float(share) <= 1:
        raise ValueError(f"partial_rotary_factor={share!r} must be above 0 and at most 1")
    return float(share)


def _read(given: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    parameters = dict(given)
    nested = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"separate rope_parameters for each kind of attention ({', '.join(nested)}) are not supported")
    parameters.pop("partial_rotary_factor", None)  # see rotary_share
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
        # transformers ignores this key outside rope_parameters, but a file that has it there expects it to be used.
        if raw.get("original_max_position_embeddings", original) not in (original, None):
            raise ValueError("original_max_position_embeddings must be inside rope_parameters (or rope_scaling)")
        parameters["original_max_position_embeddings"] = original
    if kind == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = raw["max_position_embeddings"] / parameters["original_max_position_embeddings"]
    return theta, {"rope_type": kind, **parameters}


def inverse_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Return RoPE's inverse frequencies, fp32 [F = dim / 2].

    `dim`: rotated channels per head; `theta` and `scaling`: what `read_rope` returns.
    """
    import torch  # here, because the dry-run plan reads configs without torch

    exponents_F = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies_F = 1.0 / (theta**exponents_F)
    if scaling is None:
        return frequencies_F
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies_F / factor
    if scaling["rope_type"] == "yarn":
        kept_F = _yarn_kept(dim, theta, scaling)
        return frequencies_F / factor * (1 - kept_F) + frequencies_F * kept_F
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths_F = 2 * math.pi / frequencies_F
    smooth_F = ((original / wavelengths_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth_F) * frequencies_F / factor + smooth_F * frequencies_F


def yarn_betas(scaling: Mapping[str, Any]) -> tuple[float, float]:
    """Return YaRN's beta_fast and beta_slow (or the defaults): the rotations between which it blends two scalings."""
    return scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1


def _yarn_kept(dim: int, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Return the weight of each unscaled frequency, fp32 [F]: 1 = kept, 0 = interpolated, with a ramp between."""
    import torch

    original = scaling["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (channel(value) for value in yarn_betas(scaling))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_F = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    return 1 - ramp_F.clamp(0.0, 1.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor for a context `factor` times longer: 0.1 · mscale · ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """Return YaRN's multiplier of rotated queries and keys; 1 for every other kind."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)
