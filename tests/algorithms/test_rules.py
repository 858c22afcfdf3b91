"""Losses and advantages equal the same rules written out from the papers, and each mutation of their lines does not.

PPO and GSPO are in test_against_references.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

from megarl.algorithms import advantages as shipped_advantages
from megarl.algorithms import losses as shipped_losses
from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.group_rewards import GroupRewards, advantages_of
from megarl.algorithms.interface.registry import Chosen
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import Objective
from tests.support.losses.loss_batches import loss_spec, packed_result, random_batch
from tests.support.losses.trl_loss import OWN_LOSS_TYPES, trl_result
from tests.support.losses.written_losses import ADVANTAGE_RULES, TOKEN_RULES
from tests.support.models.mutants import mutant

SEEDS = range(4)
LOSS_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cispo": ("cispo", {"clip_high": 0.3}),
    "cispo, both bounds": ("cispo", {"clip_low": 0.2, "clip_high": 0.4}),
    "sapo": ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "sapo, sharp": ("sapo", {"tau_positive": 2.0, "tau_negative": 5.0}),
    "dppo tv": ("dppo", {"divergence": "tv", "low": 0.05, "high": 0.1, "cap": 20.0}),
    "dppo kl": ("dppo", {"divergence": "kl", "low": 0.01, "high": 0.03, "cap": 1.3}),
}
ADVANTAGE_CASES: dict[str, dict[str, Any]] = {
    "grpo": {"eps": 0.1},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {"eps": 0.1},
    "reinforce_pp_baseline": {"eps": 0.1},
    "mt_grpo": {"turn_coef": 0.5, "eps": 0.1},
}


def check_loss_case(case: str, function: Callable[..., Any] | None = None) -> dict[str, float]:
    """Compare a loss, or a mutant of it, with its rule over a batch; return the shares of tokens that were bounded."""
    name, given = LOSS_CASES[case]
    chosen = LOSSES.find(name).choose(given)
    objective = Objective(Chosen(name, function or chosen.function, chosen.options))
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


LOSS_MUTANTS = [
    ("cispo", "-ratio_R.clamp(low, high)", "-ratio_R"),
    ("cispo", "inputs.ratio.detach()", "inputs.ratio"),
    ("cispo", "1.0 + options.clip_high", "options.clip_high"),
    ("cispo", "* inputs.advantages_R", "* inputs.advantages_R.abs()"),
    ("cispo, both bounds", "1.0 if options.clip_low is None else options.clip_low", "1.0"),
    ("cispo, both bounds", "clamp(low, high)", "clamp(max=high)"),
    ("sapo", "4.0 / tau_R", "1.0 / tau_R"),
    ("sapo", "(ratio_R - 1.0)", "(ratio_R)"),
    ("sapo", ".where(advantages_R > 0,", ".where(advantages_R < 0,"),
    ("sapo", "(tau_R * (ratio_R", "((ratio_R"),
    ("dppo tv", "change_R.abs()", "change_R"),
    ("dppo tv", "distance_R > options.high", "distance_R > options.low"),
    ("dppo tv", "distance_R > options.low", "distance_R > options.high"),
    ("dppo tv", "(change_R > 0) & ", ""),
    ("dppo tv", "(change_R < 0) & ", ""),
    ("dppo tv", "masked_fill(high_R | low_R, 0.0)", "masked_fill(high_R, 0.0)"),
    ("dppo tv", "masked_fill(high_R | low_R, 0.0)", "masked_fill(low_R, 0.0)"),
    ("dppo tv", "inputs.ratio.detach()", "inputs.ratio"),
    ("dppo kl", ".clamp(max=options.cap)", ""),
    ("dppo kl", "old_p_R * (old_R - new_R)", "new_p_R * (old_R - new_R)"),
    ("dppo kl", "(1.0 - old_p_R) * others_R", "0.0 * others_R"),
    ("dppo kl", "_binary_kl(inputs.old_logprobs_R, logprobs_R)", "_binary_kl(logprobs_R, inputs.old_logprobs_R)"),
    ("dppo kl", "change_R.abs() if options", "change_R.abs() if not options"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new"), LOSS_MUTANTS)
def test_mutants_of_losses_are_caught(case: str, old: str, new: str) -> None:
    name = LOSS_CASES[case][0]
    function = mutant(shipped_losses, name, old, new)
    with pytest.raises(AssertionError):
        check_loss_case(case, function)


def check_advantage_case(name: str, function: Callable[..., Any] | None = None) -> None:
    given = ADVANTAGE_CASES[name]
    chosen = ADVANTAGES.find(name).choose(given)
    chosen = Chosen(name, function or chosen.function, chosen.options)
    for seed in SEEDS:
        generator = random.Random(seed)
        rewards = [[generator.uniform(-1, 1) for _ in range(size)] for size in (2, 5, 3, 8)]
        tokens = [[generator.randrange(0, 12) for _ in group] for group in rewards]
        turns = [
            [[generator.uniform(-1, 1) for _ in range(generator.randrange(4))] for _ in group] for group in rewards
        ]
        got = advantages_of(chosen, GroupRewards(rewards, tokens, turns))
        expected = ADVANTAGE_RULES[name](rewards, tokens, turns, given)
        for mine, theirs in zip(chain(*got), chain(*expected), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ADVANTAGE_CASES)
def test_advantages_equal_the_papers(name: str) -> None:
    check_advantage_case(name)


ADVANTAGE_MUTANTS = [
    ("grpo", "(len(values) - 1)", "len(values)"),
    ("grpo", "value / (std + eps)", "value / std"),
    ("grpo", "centred(rewards)", "list(rewards)"),
    ("dr_grpo", "[centred(group) for", "[list(group) for"),
    ("rloo", "value * n / (n - 1)", "value"),
    ("rloo", "value * n / (n - 1)", "value * n / n"),
    ("reinforce_pp", "math.fsum(value * count for", "math.fsum(value for"),
    ("reinforce_pp", "** 2 * count", "** 2"),
    ("reinforce_pp", "(total - 1)", "total"),
    ("reinforce_pp", "variance + eps", "variance"),
    ("reinforce_pp", "(value - mean) * scale", "value * scale"),
    ("reinforce_pp", "math.sqrt(variance", "(variance"),
    ("reinforce_pp_baseline", "[centred(group) for", "[list(group) for"),
    ("mt_grpo", "options.turn_coef * value", "value"),
    ("mt_grpo", "[outcome + options", "[options"),
    ("mt_grpo", "in _from_each_on(each)", "in each"),
    ("mt_grpo", "accumulate(values[::-1]))[::-1]", "accumulate(values))"),
    ("mt_grpo", "in zip(standardised(rewards, options.eps), own", "in zip(rewards, own"),
    ("mt_grpo", "values = standardised([by_turn[index][turn] for index in having], options.eps)",
     "values = [by_turn[index][turn] for index in having]"),
    ("mt_grpo", "values = standardised([by_turn[index][turn] for index in having], options.eps)",
     "values = standardised([by_turn[index][turn] for index in having], 0.0)"),
    ("mt_grpo", "if each else outcome", "if each else 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), ADVANTAGE_MUTANTS)
def test_mutants_of_advantages_are_caught(name: str, old: str, new: str) -> None:
    function = mutant(shipped_advantages, name, old, new)
    with pytest.raises(AssertionError):
        check_advantage_case(name, function)


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


def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce() -> None:
    for entry in LOSSES:
        batch = random_batch(1)
        batch.old = [values.clone() for values in batch.logprobs]
        got = packed_result(batch, Objective(entry.choose({})))
        for gradient, mask, advantage in zip(got.gradient, batch.mask, batch.advantages, strict=True):
            torch.testing.assert_close(gradient, -advantage * mask.double() / batch.counts().tokens)
