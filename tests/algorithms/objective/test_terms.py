"""The terms of the loss: weights as data, each term with counts of its own, and no influence of one on another."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import (
    GlobalCounts,
    LossFunction,
    LossInputs,
    Objective,
    TermCounts,
    count_terms,
    micro_batch_loss,
)
from megarl.algorithms.objective.stats import LossStats
from tests.support.losses.loss_batches import MAX_TOKENS, Batch, cu_seqlens, random_batch

PPO = LOSSES.find("ppo").choose({})
OBJECTIVE = Objective(PPO, ce_coef=0.7, kl_coef=0.3, entropy_coef=0.1)
Weights = Mapping[str, Sequence[Tensor]]  # by the name of the stream; one per sequence
NAMES = ("rl_weights", "ce_weights", "ref_kl_weights")
KINDS = ("token_mean", "sequence_mean", "constant_length")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The loss over all micro-batches, its gradient in the log-probs of each sequence, and the statistics."""

    loss: float
    gradient: list[Tensor]
    stats: LossStats


def counted(batch: Batch, weights: Weights) -> TermCounts:
    rows = [(batch.mask[i], {name: each[i] for name, each in weights.items()}) for i in range(len(batch.mask))]
    return count_terms(rows, MAX_TOKENS)


def measured(
    batch: Batch,
    weights: Weights,
    objective: Objective = OBJECTIVE,
    split: Sequence[Sequence[int]] | None = None,
    counts: TermCounts | None = None,
    function: LossFunction | None = None,
) -> Measured:
    function = function or partial(micro_batch_loss, objective)
    counts = counts or counted(batch, weights)
    leaves = [values.clone().requires_grad_() for values in batch.logprobs]
    loss, parts = torch.zeros((), dtype=torch.float64), []
    for chosen in split if split is not None else [list(range(len(leaves)))]:

        def packed(values: Sequence[Tensor], chosen: Sequence[int] = chosen) -> Tensor:
            return torch.cat([torch.zeros(0, dtype=torch.float64), *(values[i].double() for i in chosen)])

        advantages = [torch.full((n,), a, dtype=torch.float64) for n, a in zip(batch.lengths, batch.advantages)]
        streams = {
            "old_logprobs": packed(batch.old),
            "rollout_logprobs": packed(batch.rollout),
            "advantages": packed(advantages),
            "reference_logprobs": packed(batch.reference),
            **{name: packed(values) for name, values in weights.items()},
        }
        cuts = cu_seqlens([batch.lengths[i] for i in chosen])
        mask_R = packed(batch.mask).bool()
        result = function(LossInputs(packed(leaves), mask_R, cuts, counts, streams, packed(batch.entropy)))
        loss = loss + result.loss
        parts.append(result.stats)
    loss.backward()
    gradient = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return Measured(float(loss.detach()), gradient, LossStats.merge(parts))


def assert_same(one: Measured, other: Measured) -> None:
    assert other.loss == pytest.approx(one.loss, rel=1e-9, abs=1e-12)
    for mine, theirs in zip(one.gradient, other.gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@st.composite
def weighted_batches(draw: st.DrawFn) -> tuple[Batch, dict[str, list[Tensor]], list[list[int]]]:
    """A ragged batch, weights of any of the terms (many of them 0), and any partition of its sequences."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    batch = random_batch(draw(st.integers(0, 2**20)), lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def weights_of(length: int) -> Tensor:
        drawn = torch.randn(length, generator=generator, dtype=torch.float64)
        return drawn * (torch.rand(length, generator=generator) > 0.4)

    weights = {name: [weights_of(n) for n in lengths] for name in NAMES if draw(st.booleans())}
    parts = draw(st.integers(1, 4))
    owner = [draw(st.integers(0, parts - 1)) for _ in lengths]
    return batch, weights, [[i for i, part in enumerate(owner) if part == p] for p in range(parts)]


@settings(max_examples=80)
@given(weighted_batches(), st.sampled_from(KINDS))
def test_no_split_changes_a_term(case: tuple[Batch, dict[str, list[Tensor]], list[list[int]]], kind: str) -> None:
    batch, weights, split = case
    objective = dataclasses.replace(OBJECTIVE, aggregation=kind)  # type: ignore[arg-type]
    whole, parts = measured(batch, weights, objective), measured(batch, weights, objective, split)
    assert_same(whole, parts)
    means, others = whole.stats.means(), parts.stats.means()
    for key in (
        "ce",
        "ce_loss",
        "ce_tokens",
        "kl_ref",
        "ref_kl_loss",
        "ref_kl_tokens",
        "policy_loss",
        "tokens",
        "ratio",
    ):
        assert others[key] == pytest.approx(means[key], rel=1e-9, abs=1e-12), key


def mean_of(sequences: Sequence[tuple[float, int]], kind: str) -> float:
    """The mean of a term by its definition, from the sum over each sequence's tokens and their number."""
    there = [(total, number) for total, number in sequences if number]
    if not there:
        return 0.0
    if kind == "sequence_mean":
        return sum(total / number for total, number in there) / len(there)
    total = sum(each for each, _ in there)
    return total / (sum(number for _, number in there) if kind == "token_mean" else len(there) * MAX_TOKENS)


def check_written_out(batch: Batch, weights: Weights, kind: str) -> None:
    """Each term token by token, with the counts that replicas of one sequence each add up."""
    parts = [
        count_terms([(batch.mask[i], {n: w[i] for n, w in weights.items()})], MAX_TOKENS)
        for i in range(len(batch.mask))
    ]
    objective = dataclasses.replace(OBJECTIVE, aggregation=kind)  # type: ignore[arg-type]
    got = measured(batch, weights, objective, counts=TermCounts.total(parts, MAX_TOKENS))
    sums: dict[str, list[tuple[float, int]]] = {name: [] for name in (*NAMES, "entropy")}
    for i, advantage in enumerate(batch.advantages):
        own = {name: [0.0, 0] for name in sums}
        for t in range(batch.lengths[i]):
            trained = bool(batch.mask[i][t])
            new, old, reference = (float(v[i][t]) for v in (batch.logprobs, batch.old, batch.reference))
            ratio = math.exp(new - old)
            policy = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            values = {
                "rl_weights": {"rl_weights": policy, "entropy": float(batch.entropy[i][t])},
                "ce_weights": {"ce_weights": -new},
                "ref_kl_weights": {"ref_kl_weights": math.exp(reference - new) - 1 - (reference - new)},
            }
            for name, of_term in values.items():
                default = 0.0 if name == "ce_weights" else 1.0
                weight = float(weights[name][i][t]) if name in weights else default
                if weight and (trained or name == "ce_weights"):
                    for each, value in of_term.items():
                        own[each] = [own[each][0] + weight * value, own[each][1] + 1]
        for name, (summed, number) in own.items():
            sums[name].append((summed, int(number)))
    rl, ce, kl, entropy = (mean_of(sums[name], kind) for name in (*NAMES, "entropy"))
    assert got.loss == pytest.approx(rl + 0.7 * ce + 0.3 * kl - 0.1 * entropy, rel=1e-9, abs=1e-12)
    means = got.stats.means()
    found = [means[key] for key in ("tokens", "ce_tokens", "ref_kl_tokens", "policy_loss", "ce_loss", "ref_kl_loss")]
    tokens = [sum(number for _, number in sums[name]) for name in NAMES]
    assert found == pytest.approx([*tokens, rl, ce, kl], rel=1e-9, abs=1e-12)


@settings(max_examples=60)
@given(weighted_batches(), st.sampled_from(KINDS))
def test_terms_are_means_over_their_own_tokens(
    case: tuple[Batch, dict[str, list[Tensor]], list[list[int]]], kind: str
) -> None:
    """Written out token by token; the number of tokens of one term is in no other."""
    batch, weights, _ = case
    check_written_out(batch, weights, kind)


@pytest.mark.parametrize("correction", [None, CorrectionSpec("token_tis", 1.5)])
@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant_length"])
def test_weights_of_one_change_no_bit(kind: str, correction: CorrectionSpec | None) -> None:
    objective = dataclasses.replace(OBJECTIVE, aggregation=kind, correction=correction)  # type: ignore[arg-type]
    batch = random_batch(3)
    ones = [torch.ones(n, dtype=torch.float64) for n in batch.lengths]
    without, given_ones = (
        measured(batch, {}, objective),
        measured(batch, {"rl_weights": ones, "ref_kl_weights": ones}, objective),
    )
    assert given_ones.loss == without.loss
    assert all(torch.equal(a, b) for a, b in zip(without.gradient, given_ones.gradient, strict=True))


def test_a_token_with_weight_zero_is_as_good_as_masked() -> None:
    """For the policy loss, its count and its statistics; a GSPO ratio does not contain it either."""
    batch = random_batch(4)
    masked = dataclasses.replace(batch, mask=[mask.clone() for mask in batch.mask])
    weights = [torch.ones(n, dtype=torch.float64) for n in batch.lengths]
    for index in (0, 2, 4):
        weights[index][1:] = 0.0
        masked.mask[index][1:] = False
    for name in ("ppo", "gspo"):
        objective = Objective(LOSSES.find(name).choose({}), aggregation="sequence_mean", entropy_coef=0.1)
        one, other = measured(batch, {"rl_weights": weights}, objective), measured(masked, {}, objective)
        assert_same(one, other)
        for key in ("tokens", "sequences", "ratio", "approx_kl", "entropy", "clip_fraction"):
            assert one.stats.means()[key] == pytest.approx(other.stats.means()[key])


def test_a_loss_on_observations_leaves_the_policy_loss_alone() -> None:
    """Tokens that the model did not sample are in `ce` only, and what else stands there is ignored."""
    batch = random_batch(5)
    observed = {"ce_weights": [(~mask).double() for mask in batch.mask]}
    for values in (batch.old, batch.rollout, batch.reference):
        for each, mask in zip(values, batch.mask, strict=True):
            each[~mask] = math.nan
    with_ce, without = measured(batch, observed), measured(batch, {})
    for one, other, mask in zip(with_ce.gradient, without.gradient, batch.mask, strict=True):
        torch.testing.assert_close(one[mask], other[mask])
        number = sum(int((~each).sum()) for each in batch.mask)
        torch.testing.assert_close(one[~mask], torch.full_like(one[~mask], -0.7 / number))


def test_supervised_rows_are_cross_entropy_and_nothing_else() -> None:
    """SFT as data: weight 0 in `rl` and `ref_kl`, 1 in `ce`; rows of both kinds share a mini-batch."""
    batch = random_batch(6)
    demonstrations = (1, 2)
    rl = [torch.full((n,), float(i not in demonstrations), dtype=torch.float64) for i, n in enumerate(batch.lengths)]
    ce = [1.0 - values for values in rl]
    got = measured(batch, {"rl_weights": rl, "ref_kl_weights": rl, "ce_weights": ce})
    rest = [i for i in range(len(batch.lengths)) if i not in demonstrations]
    alone = measured(Batch(*([v[i] for i in rest] for v in vars(batch).values())), {})  # type: ignore[arg-type]
    for place, i in enumerate(rest):
        torch.testing.assert_close(got.gradient[i], alone.gradient[place])
    tokens = sum(batch.lengths[i] for i in demonstrations)
    for i in demonstrations:
        torch.testing.assert_close(got.gradient[i], torch.full_like(got.gradient[i], -0.7 / tokens))


def test_only_supervised_rows_train_without_a_policy_loss() -> None:
    batch = random_batch(7)
    none = [torch.zeros(n, dtype=torch.float64) for n in batch.lengths]
    ones = [torch.ones(n, dtype=torch.float64) for n in batch.lengths]
    got = measured(batch, {"rl_weights": none, "ref_kl_weights": none, "ce_weights": ones})
    expected = -sum(float(values.sum()) for values in batch.logprobs) / sum(batch.lengths)
    assert got.loss == pytest.approx(0.7 * expected)
    means = got.stats.means()
    assert (means["ce"], means["tokens"], means["ref_kl_tokens"]) == (pytest.approx(expected), 0.0, 0.0)


def test_any_stream_of_log_probs_is_a_reference() -> None:
    """Distillation as data: no policy loss, and the KL to a teacher, of which k2 has the gradient."""
    batch = random_batch(8)
    objective = dataclasses.replace(
        OBJECTIVE, kl_estimator="k2", kl_coef=1.0, entropy_coef=0.0, reference_stream="rollout_logprobs"
    )
    got = measured(batch, {"rl_weights": [torch.zeros(n, dtype=torch.float64) for n in batch.lengths]}, objective)
    tokens = batch.counts().tokens
    for gradient, new, teacher, mask in zip(got.gradient, batch.logprobs, batch.rollout, batch.mask, strict=True):
        torch.testing.assert_close(gradient, (new - teacher) * mask / tokens)


def test_counts_are_those_of_each_term_over_all_replicas() -> None:
    rows = [
        (torch.tensor([True, True, False]), {"ce_weights": torch.tensor([0.0, 0.0, 2.0])}),
        (torch.tensor([True, False]), {"rl_weights": torch.tensor([0.0, 1.0]), "ce_weights": torch.tensor([0.0, 0.0])}),
        (
            torch.tensor([True, True]),
            {"rl_weights": torch.tensor([0.5, -1.0]), "ref_kl_weights": torch.tensor([1.0, 0.0])},
        ),
    ]
    counts = count_terms(rows, 9)
    assert counts == TermCounts(GlobalCounts(4, 2, 9), GlobalCounts(1, 1, 9), GlobalCounts(4, 3, 9))
    assert TermCounts.total([count_terms(rows[:1], 9), count_terms(rows[1:], 9), count_terms([], 9)], 9) == counts
    assert not counts.empty and count_terms([], 9).empty
    plain = [(mask, {}) for mask, _ in rows]
    assert count_terms(plain, 9) == TermCounts.without_streams(GlobalCounts.of([2, 1, 2], 9))


def test_counts_of_other_tokens_are_refused() -> None:
    """A rank whose counts leave out its own tokens would divide by too little."""
    batch = random_batch(9)
    wrong = TermCounts.without_streams(batch.counts())
    with pytest.raises(ValueError, match="although this micro-batch trains"):
        measured(batch, {"ce_weights": [torch.ones(n) for n in batch.lengths]}, counts=wrong)
