"""Importance weights of token losses, p / q, with a bound: each a pure function, registered under its name.

p is the probability of the sampled token under the proximal policy, q under the one that sampled. The weights carry no
gradient. A sequence's weight is that of each of its tokens.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.correction.config import CorrectionSpec, WeightKind
from megarl.algorithms.correction.ratios import LogRatios, bounded_exp


@dataclass(frozen=True)
class BoundedWeights:
    """`weights_R`: [R], detached, 0 where not trained. `capped_R`, `dropped_R`: [R] bool, cut at the cap, set to 0."""

    weights_R: Tensor
    capped_R: Tensor
    dropped_R: Tensor


@dataclass(frozen=True)
class Weight:
    """A registered weight. `of_sequence`: it is one number per sequence. `paper`: where it comes from."""

    function: Callable[[LogRatios, CorrectionSpec], BoundedWeights]
    of_sequence: bool
    paper: str


WEIGHTS: dict[WeightKind, Weight] = {}


def _register(
    kind: WeightKind, *, of_sequence: bool, paper: str
) -> Callable[[Callable[[LogRatios, CorrectionSpec], BoundedWeights]], Callable[..., BoundedWeights]]:
    def add(function: Callable[[LogRatios, CorrectionSpec], BoundedWeights]) -> Callable[..., BoundedWeights]:
        WEIGHTS[kind] = Weight(function, of_sequence, paper)
        return function

    return add


@_register("none", of_sequence=False, paper="the decoupled objective with both policies taken as equal")
def none(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return 1 for every trained token."""
    neither_R = torch.zeros_like(ratios.keep_R)
    return BoundedWeights(ratios.keep_R.to(ratios.values_R.dtype), neither_R, neither_R)


@_register("token_tis", of_sequence=False, paper="Ionides 2008; fengyao.notion.site/off-policy-rl")
def token_tis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return min(p / q, cap) of each token: truncated importance sampling.

    It equals verl's `rollout_is: token` with `rollout_is_threshold: cap`, TRL's `token_truncate` and AReaL's
    `{level: token, action: clamp, metric: ratio, upper: cap}`.
    """
    return _truncated(ratios, bounded_exp(ratios.values_R), options.cap)


@_register("sequence_tis", of_sequence=True, paper="Ionides 2008; richardli.xyz/rl-collapse")
def sequence_tis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return min(product of p / q over the sequence, cap) for each of its tokens.

    It equals verl's `rollout_is: sequence` and TRL's `sequence_truncate`. AReaL's sequence weight is another one: the
    geometric mean, and bounded only where the sequence is out of bounds.
    """
    return _truncated(ratios, bounded_exp(ratios.sums(ratios.values_R))[ratios.ids_R], options.cap)


@_register("icepop", of_sequence=False, paper="IcePop, arXiv:2510.18855")
def icepop(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return p / q of each token inside [low, high], and 0 outside.

    It equals verl's `rollout_is: token` with `rollout_is_threshold: "low_high"`, TRL's `token_mask` and AReaL's
    `{level: token, action: mask, metric: ratio}`.
    """
    return _banded(ratios, bounded_exp(ratios.values_R), options)


@_register("sequence_mis", of_sequence=True, paper="masked importance sampling, richardli.xyz/rl-collapse")
def sequence_mis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return the product of p / q over the sequence for each of its tokens, inside [low, high], and 0 outside.

    It equals verl's `rollout_is: sequence` with `rollout_is_threshold: "low_high"` and TRL's `sequence_mask`, its
    default, which has an upper bound of 3 and none below.
    """
    return _banded(ratios, bounded_exp(ratios.sums(ratios.values_R))[ratios.ids_R], options)


def _truncated(ratios: LogRatios, ratio_R: Tensor, cap: float) -> BoundedWeights:
    capped_R = ratios.keep_R & (ratio_R > cap)
    weights_R = torch.where(ratios.keep_R, ratio_R.clamp(max=cap), ratio_R.new_zeros(()))
    return BoundedWeights(weights_R, capped_R, torch.zeros_like(capped_R))


def _banded(ratios: LogRatios, ratio_R: Tensor, options: CorrectionSpec) -> BoundedWeights:
    inside_R = (ratio_R >= options.low) & (ratio_R <= options.high)
    weights_R = torch.where(ratios.keep_R & inside_R, ratio_R, ratio_R.new_zeros(()))
    return BoundedWeights(weights_R, torch.zeros_like(inside_R), ratios.keep_R & ~inside_R)
