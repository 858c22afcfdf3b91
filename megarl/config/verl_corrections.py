"""verl's names of off-policy corrections (0.9.1, RolloutCorrectionConfig), as keys of `algorithm.correction`.

verl writes two bounds as one string, "low_high", and several masks, with their bounds, as strings with commas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from megarl.algorithms.correction_config import RATIO_MASKS, MaskKind

# Each name, and the key of megarl that it sets first.
CORRECTION_TARGETS = {
    "rollout_is": "algorithm.correction.kind",
    "rollout_is_threshold": "algorithm.correction.cap",
    "rollout_rs": "algorithm.correction.masks",
    "rollout_rs_threshold": "algorithm.correction.masks",
}
_WEIGHTS = {"token": ("token_tis", "icepop"), "sequence": ("sequence_tis", "sequence_mis")}
_MASKS = [kind for kind in get_args(MaskKind) if kind not in RATIO_MASKS]


def correction_values(section: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """Yield (verl's name, key of `algorithm.correction`, value) for the names of verl in a section.

    Raises ValueError that begins with the name whose value has no equivalent.
    """
    yield from _weight(section)
    if section.get("rollout_rs") is not None:
        yield "rollout_rs", "masks", list(_masks(section["rollout_rs"], section.get("rollout_rs_threshold")))
        yield "rollout_rs", "denominator", "kept"
    elif section.get("rollout_rs_threshold") is not None:
        raise ValueError("rollout_rs_threshold: there is no rollout_rs beside it; add it, or remove the threshold")


def _weight(section: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    threshold = section.get("rollout_is_threshold")
    banded = isinstance(threshold, str) and "_" in threshold
    if banded:
        low, high = _band("rollout_is_threshold", str(threshold))
        if section.get("rollout_is") not in _WEIGHTS:
            raise ValueError("rollout_is_threshold: two bounds need rollout_is: token or sequence beside them")
        yield "rollout_is_threshold", "low", low
        yield "rollout_is_threshold", "high", high
    elif threshold is not None:
        _refuse_joined("rollout_is_threshold", threshold)
        yield "rollout_is_threshold", "cap", threshold
    if "rollout_is" not in section:
        return
    kind = section["rollout_is"]
    if kind is None:
        yield "rollout_is", "kind", "none"
    elif isinstance(kind, str) and kind in _WEIGHTS:
        yield "rollout_is", "kind", _WEIGHTS[kind][banded]
    else:
        raise ValueError(f"rollout_is: must be 'token', 'sequence' or null, not {kind!r}")


def _masks(names: object, thresholds: object) -> Iterator[dict[str, object]]:
    kinds = [each.strip() for each in str(names).split(",") if each.strip()]
    for kind in kinds:
        if kind not in _MASKS:
            raise ValueError(f"rollout_rs: must be of {', '.join(_MASKS)}, not {kind!r}")
    if thresholds is None or isinstance(thresholds, bool):
        raise ValueError(f"rollout_rs_threshold: must be a bound for each of {', '.join(kinds)}, not {thresholds!r}")
    bounds = [each.strip() for each in str(thresholds).split(",")]
    if len(bounds) == 1:
        bounds *= len(kinds)
    if len(bounds) != len(kinds):
        raise ValueError(f"rollout_rs_threshold: {len(bounds)} bounds for the {len(kinds)} of rollout_rs")
    for kind, bound in zip(kinds, bounds, strict=True):
        if "_" in bound:
            low, high = _band("rollout_rs_threshold", bound)
            yield {"kind": kind, "low": low, "high": high}
        else:
            if kind.endswith("k1"):
                _refuse_joined("rollout_rs_threshold", _number("rollout_rs_threshold", bound))
            yield {"kind": kind, "high": _number("rollout_rs_threshold", bound)}


def _band(name: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("_")
    return _number(name, low), _number(name, high)


def _refuse_joined(name: str, bound: object) -> None:
    """Raise ValueError for an upper bound of a ratio below 1: YAML reads 0.5_2 as the number 0.52."""
    if isinstance(bound, int | float) and bound < 1:
        raise ValueError(f"{name}: the largest ratio must be at least 1, not {bound}; quote two bounds, '0.5_2.0'")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a number") from None
