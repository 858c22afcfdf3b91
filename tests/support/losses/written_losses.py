"""Losses and advantages written again from the papers, in plain Python, with the slopes written out.

They share no code with megarl.algorithms, and are meant to be read against the equations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

# (new log-prob, old log-prob, advantage, options) -> (loss, its slope in the new log-prob)
TokenRule = Callable[[float, float, float, dict[str, Any]], tuple[float, float]]
Rewards = list[list[float]]
Turns = list[list[list[float]]]  # rewards of the turns of each sample of each group
# (rewards, trained tokens, rewards of turns, options) -> for each sample its advantage, or one for each of its turns
AdvantageRule = Callable[[Rewards, list[list[int]], Turns, dict[str, Any]], Sequence[Sequence[float | list[float]]]]


def cispo(new: float, old: float, advantage: float, options: dict[str, Any]) -> tuple[float, float]:
    """arXiv:2506.13585: sg(clip(r, 1 - low, 1 + high)) A log pi; the weight has no slope."""
    ratio = math.exp(new) / math.exp(old)
    weight = min(ratio, 1 + options["clip_high"])
    if options.get("clip_low") is not None:
        weight = max(weight, 1 - options["clip_low"])
    return -weight * advantage * new, -weight * advantage


def sapo(new: float, old: float, advantage: float, options: dict[str, Any]) -> tuple[float, float]:
    """arXiv:2511.20347: f = 4 / tau p with p = sigma(tau (r - 1)), whose slope in r is 4 p (1 - p)."""
    ratio = math.exp(new) / math.exp(old)
    tau = options["tau_positive"] if advantage > 0 else options["tau_negative"]
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage


def dppo(new: float, old: float, advantage: float, options: dict[str, Any]) -> tuple[float, float]:
    """arXiv:2602.04879: outside of the trust region a token has no slope, if the step would lead farther out."""
    p, q = math.exp(new), math.exp(old)
    if options["divergence"] == "tv":
        divergence = max(p, q) - min(p, q)
    else:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    outside_above = advantage > 0 and p > q and divergence > options["high"]
    outside_below = advantage <= 0 and p < q and divergence > options["low"]
    weight = 0.0 if outside_above or outside_below else min(p / q, options["cap"])
    return -weight * advantage * new, -weight * advantage


TOKEN_RULES: dict[str, TokenRule] = {"cispo": cispo, "sapo": sapo, "dppo": dppo}


def grpo(rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]) -> list[list[float]]:
    """arXiv:2402.03300 section 4.1.2."""
    return [[(r - statistics.fmean(g)) / (statistics.stdev(g) + options["eps"]) for r in g] for g in rewards]


def dr_grpo(rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]) -> list[list[float]]:
    """arXiv:2503.20783."""
    return [[r - statistics.fmean(g) for r in g] for g in rewards]


def rloo(rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]) -> list[list[float]]:
    """arXiv:2402.14740: the baseline is the mean of the others."""
    return [[r - statistics.fmean(g[:i] + g[i + 1 :]) for i, r in enumerate(g)] for g in rewards]


def reinforce_pp(rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]) -> list[list[float]]:
    """arXiv:2501.03262: normalised over the batch, each response as often as it has trained tokens."""
    each = [
        r for g, counts in zip(rewards, tokens, strict=True) for r, n in zip(g, counts, strict=True) for _ in range(n)
    ]
    mean, variance = statistics.fmean(each), statistics.variance(each)
    return [[(r - mean) / math.sqrt(variance + options["eps"]) for r in g] for g in rewards]


def reinforce_pp_baseline(
    rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]
) -> list[list[float]]:
    """arXiv:2501.03262, with the mean of the group as its baseline."""
    return reinforce_pp(dr_grpo(rewards, tokens, turns, options), tokens, turns, options)


def mt_grpo(
    rewards: Rewards, tokens: list[list[int]], turns: Turns, options: dict[str, Any]
) -> list[list[float | list[float]]]:
    """arXiv:2505.11821: A_k = A^out + lambda (A^turn_k + A^turn_{k+1} + ...), each among the samples that have it."""
    result = []
    for outcomes, (rs, by_turn) in zip(
        grpo(rewards, tokens, turns, options), zip(rewards, turns, strict=True), strict=True
    ):
        own: list[float | list[float]] = []
        for i in range(len(rs)):
            credit = [0.0] * len(by_turn[i])
            for k in range(len(by_turn[i])):
                for j in range(k, len(by_turn[i])):
                    peers = [each[j] for each in by_turn if len(each) > j]
                    if len(peers) > 1:
                        z = (by_turn[i][j] - statistics.fmean(peers)) / (statistics.stdev(peers) + options["eps"])
                        credit[k] += options["turn_coef"] * z
            own.append([outcomes[i] + value for value in credit] if credit else outcomes[i])
        result.append(own)
    return result


ADVANTAGE_RULES: dict[str, AdvantageRule] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "mt_grpo": mt_grpo,
}
