"""The config section `algorithm.correction`: one weight, any number of masks, and the source of the proximal policy.

Imports no torch, because the config is read without it. `masks.py` and `apply.py` define the names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from megarl.common.options import Section

WeightKind = Literal["none", "token_tis", "sequence_tis", "icepop", "sequence_mis"]
MaskKind = Literal[
    "token",
    "sequence",
    "geometric",
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
ProximalKind = Literal["trainer", "loglinear"]

CAPPED, BANDED = ("token_tis", "sequence_tis"), ("icepop", "sequence_mis")


class MaskConfig(Section):
    """Excludes tokens or whole sequences on which the two policies are too far apart."""

    kind: MaskKind
    """The bounded quantity. token, sequence, geometric: p / q of the token, its product over the sequence, its
    geometric mean. The others are verl's, by name and bounds: an estimate of KL(q to p), k1 = log(q / p), k2 = log(p /
    q)^2 / 2 or k3 = p / q - 1 - log(p / q), of the token or as sum, mean or maximum over the sequence."""
    low: float | None = Field(None, gt=0)
    """Least ratio that `token`, `sequence` and `geometric` keep; for k1 the least exp(k1), which is a ratio q / p.
    Default: 1 / high. k2 and k3 have none."""
    high: float = Field(..., gt=0, description="The largest such ratio; for k2 and k3 the largest estimate in nats.")

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds in the unit of the options; the lower one is 0 for k2 and k3."""
        if self.kind.endswith(("k2", "k3")):
            return 0.0, self.high
        return (1.0 / self.high if self.low is None else self.low), self.high


class CorrectionConfig(Section):
    """Corrects the policy loss for tokens sampled by older weights or with the engine's arithmetic."""

    kind: Literal["auto", WeightKind] = "auto"
    """Multiplies each token's policy loss by a weight. q is the engine's probability of the token, p the trainer's
    before the first update of the step, which is then also the denominator of the ratio (decoupled PPO). token_tis:
    truncated importance sampling, min(p / q, cap). sequence_tis: the same with the product of p / q over the sequence.
    icepop: p / q inside [low, high], otherwise 0. sequence_mis: the same with the product. Several mini-batches need a
    log-prob pass (see `proximal`). auto: token_tis if generation runs ahead of training, otherwise none, as with
    `admission.mode: sync`."""
    cap: float = Field(2.0, ge=1, description="Largest weight (C) of token_tis and sequence_tis.")
    low: float = Field(0.5, gt=0, le=1, description="Least ratio p / q that icepop and sequence_mis keep.")
    high: float = Field(2.0, ge=1, description="Largest ratio p / q that icepop and sequence_mis keep.")
    masks: list[MaskConfig] = Field(default_factory=list)
    """Tokens to exclude from the policy loss, with any weight or none. A token stays only if every mask keeps it."""
    denominator: Literal["trained", "kept"] = "trained"
    """Whether masked tokens count when token losses are averaged. trained: they do, so the weight of the others does
    not depend on them (as in AReaL and TRL). kept: they do not, nor in the KL and entropy terms (as in verl); this
    needs a log-prob pass. A weight of 0 always counts."""
    proximal: ProximalKind = "trainer"
    """p in a step of several updates. trainer: from a log-prob pass before the first. loglinear: no pass, interpolated
    by version between the engine's and the current log-prob (AReaL's approximation)."""


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction and its bounds, as in the config section `algorithm.correction`, with `auto` resolved.

    `masks`: those applied inside the loss. With `denominator: kept` masks are applied to the samples before.
    """

    kind: WeightKind
    cap: float = 2.0
    low: float = 0.5
    high: float = 2.0
    masks: tuple[MaskConfig, ...] = ()
    proximal: ProximalKind = "trainer"


def section_problems(section: CorrectionConfig) -> Iterator[str]:
    """Yield contradictions inside the section, as `key: problem; fix`."""
    key, defaults = "algorithm.correction", CorrectionConfig()
    unused = {"cap": CAPPED, "low": BANDED, "high": BANDED}
    for name, kinds in unused.items():
        value = getattr(section, name)
        # `auto` may become a kind with a cap. `none` switches off, and the other keys may stay. A resolved config
        # holds every default.
        if section.kind not in (*kinds, "auto", "none") and value != getattr(defaults, name):
            yield f"{key}.{name}: {value} has no effect with kind: {section.kind}; remove it, or use {_or(kinds)}"
    if section.kind == "auto":
        for name in ("low", "high"):
            if (value := getattr(section, name)) != getattr(defaults, name):
                yield f"{key}.{name}: {value} has no effect with kind: auto; remove it, or use {_or(BANDED)}"
    seen = set()
    for index, mask in enumerate(section.masks):
        if mask.kind in seen:
            yield f"{key}.masks.{index}: a second mask {mask.kind}; keep the one with the narrower bounds"
        seen.add(mask.kind)
        yield from _mask_problems(mask, f"{key}.masks.{index}")
    if section.denominator == "kept" and not section.masks:
        yield f"{key}.denominator: kept applies to masked tokens, and there are no masks; remove it, or add masks"
    if section.denominator == "kept" and section.kind.startswith("sequence"):
        for mask in section.masks:
            if mask.kind.startswith("token"):
                yield (
                    f"{key}.denominator: kept removes tokens ({mask.kind}) from the sequences whose product is the "
                    f"weight of {section.kind}; use denominator: trained, or masks of whole sequences"
                )
    if section.denominator == "kept" and section.proximal == "loglinear":
        yield (
            f"{key}.proximal: loglinear masks tokens during the update, but denominator: kept counts them before it; "
            "use proximal: trainer or denominator: trained"
        )


def _mask_problems(mask: MaskConfig, key: str) -> Iterator[str]:
    if mask.kind.endswith(("k2", "k3")):
        if mask.low is not None:
            yield f"{key}.low: {mask.kind} is never negative and has only an upper bound; remove it"
        return
    low, high = mask.bounds
    if not low <= 1.0 <= high:
        yield (
            f"{key}: [{low:g}, {high:g}] excludes tokens on which both policies agree (ratio 1); use low <= 1 <= high"
        )


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(names)
