"""Losses equal the same rules written out from the papers, and REINFORCE++ at its edges.

PPO and GSPO are in test_against_references.py, advantages in test_losses_against_oracles.py.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.group_rewards import GroupRewards, advantages_of
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import Objective
from tests.support.losses.loss_batches import loss_spec, packed_result, random_batch
from tests.support.losses.trl_loss import OWN_LOSS_TYPES, trl_result

# Losses from the papers, in plain Python, with the slopes written out: no code of megarl.algorithms.
# (new log-prob, old log-prob, advantage, options) -> (loss, its slope in the new log-prob)
TokenRule = Callable[[float, float, float, dict[str, Any]], tuple[float, float]]


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
SEEDS = range(4)
LOSS_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cispo": ("cispo", {"clip_high": 0.3}),
    "cispo, both bounds": ("cispo", {"clip_low": 0.2, "clip_high": 0.4}),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "sapo, sharp": ("sapo", {"tau_positive": 2.0, "tau_negative": 5.0}),
    "dppo tv": ("dppo", {"divergence": "tv", "low": 0.05, "high": 0.1, "cap": 20.0}),
    "dppo kl": ("dppo", {"divergence": "kl", "low": 0.01, "high": 0.03, "cap": 1.3}),
}


def check_loss_case(case: str) -> dict[str, float]:
    """Compare a loss with its rule over a batch; return the shares of tokens that were bounded."""
    name, given = LOSS_CASES[case]
    objective = Objective(LOSSES.find(name).choose(given))
    bounded = dict.fromkeys(("clip_low", "clip_high", "clip_dual"), 0.0)
    for seed in SEEDS:
        batch = random_batch(seed, lengths=(40, 7, 1, 60, 25, 33))
        batch.old = [values.clamp(max=-1e-3) for values in batch.old]  # as log-probs are
        got = packed_result(batch, objective)
        tokens, total = batch.counts().tokens, 0.0
        for index, advantage in enumerate(batch.advantages):
            for place in range(batch.lengths[index]):
                slope = 0.0
                if batch.mask[index][place]:
                    new, old = float(batch.logprobs[index][place]), float(batch.old[index][place])
                    loss, slope = TOKEN_RULES[name](new, old, advantage, given)
                    total += loss / tokens
                assert float(got.gradient[index][place]) == pytest.approx(slope / tokens, rel=1e-9, abs=1e-13)
        assert got.loss == pytest.approx(total, rel=1e-9)
        means = got.stats.means()
        bounded = {key: share + means[key] for key, share in bounded.items()}
    return bounded


@pytest.mark.parametrize("case", LOSS_CASES)
def test_losses_equal_the_papers(case: str) -> None:
    check_loss_case(case)


def test_every_bound_is_met() -> None:
    """The comparison would prove little if no weight were ever cut, and no token left the trust region."""
    assert check_loss_case("cispo")["clip_high"] > 0 == check_loss_case("cispo")["clip_low"]
    assert min(check_loss_case("cispo, both bounds")[key] for key in ("clip_low", "clip_high")) > 0
    assert min(check_loss_case("dppo tv")[key] for key in ("clip_low", "clip_high")) > 0
    assert min(check_loss_case("dppo kl").values()) > 0


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("cispo", {"clip_high": 0.3}, {"epsilon_high": 1.3}),
        (
            "sapo",
            {"tau_positive": 1.0, "tau_negative": 3.0},
            {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 3.0},
        ),
    ],
)
def test_losses_equal_trl(name: str, options: dict[str, float], settings: dict[str, float]) -> None:
    spec = loss_spec(aggregation=OWN_LOSS_TYPES[name], kl_coef=0.1)
    objective = dataclasses.replace(spec.objective, loss=LOSSES.find(name).choose(options))
    for seed in SEEDS:
        batch = random_batch(seed)
        ours, theirs = packed_result(batch, objective), trl_result(batch, spec, name, **settings)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-9)
        for mine, other in zip(ours.gradient, theirs.gradient, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_reinforce_gives_equal_rewards_nothing_and_needs_two_tokens() -> None:
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        chosen = ADVANTAGES.find(name).choose({})
        assert advantages_of(chosen, GroupRewards([[1.0, 1.0], [1.0]], [[3, 4], [1]])) == [[0.0, 0.0], [0.0]]
        assert advantages_of(chosen, GroupRewards([[1.0, 2.0]], [[1, 0]])) == [[0.0, 0.0]]
    # Without a baseline of the group, a group of equal rewards is better or worse than the others.
    got = advantages_of(
        ADVANTAGES.find("reinforce_pp").choose({}), GroupRewards([[1.0, 1.0], [0.0, 0.0]], [[1] * 2] * 2)
    )
    better, worse = got[0][0], got[1][0]
    assert isinstance(better, float) and isinstance(worse, float) and better == -worse > 0
