"""Statistics by source: those of each bucket are those of its tokens, however these are split."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objective.stats import KEYS, TAIL, Gap, LossStats, OriginGaps

BUCKETS = 5


def gap_of(gaps: OriginGaps, bucket: int) -> Gap:
    filled = gaps.filled()
    return Gap.of([filled[bucket]] if bucket in filled else [])


TOKENS = st.lists(
    st.tuples(st.floats(-9.0, 0.0, width=32), st.floats(-9.0, 0.0, width=32), st.booleans(), st.integers(0, 4)),
    min_size=1,
    max_size=40,
)


def tensors(tokens: list[tuple[float, float, bool, int]]) -> tuple[torch.Tensor, ...]:
    engine, trainer, keep, source = zip(*tokens, strict=True)
    return torch.tensor(engine), torch.tensor(trainer), torch.tensor(keep), torch.tensor(source)


@given(TOKENS)
@settings(deadline=None)
def test_each_bucket_has_the_statistics_of_its_tokens(tokens: list[tuple[float, float, bool, int]]) -> None:
    gaps = OriginGaps.zeros(BUCKETS)
    gaps.add(*tensors(tokens))
    for bucket in range(BUCKETS):
        mine = [each for each in tokens if each[2] and each[3] == bucket]
        found = gap_of(gaps, bucket)
        assert found.tokens == len(mine)
        if not mine:
            assert (found.logprob_abs_diff, found.logprob_abs_diff_max, found.tail, found.ess) == (0.0, 0.0, 0.0, 1.0)
            continue
        engine_R, trainer_R, keep_R, _ = tensors(mine)
        means = LossStats.of_pair(engine_R, trainer_R, keep_R, torch.tensor([0, len(mine)])).means()
        assert found.logprob_abs_diff == pytest.approx(means["logprob_abs_diff"])
        assert found.logprob_abs_diff_max == pytest.approx(means["logprob_abs_diff_max"])
        assert found.approx_kl == pytest.approx(means["approx_kl"], abs=1e-12)
        assert found.ess == pytest.approx(means["ess"])
        differences = (trainer_R.double() - engine_R.double()).abs()
        assert found.tail == pytest.approx(float((differences > math.log(2.0)).double().mean()))


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
@settings(deadline=None)
def test_any_split_into_micro_batches_and_ranks_reduces_to_the_same(
    tokens: list[tuple[float, float, bool, int]], cuts: list[int]
) -> None:
    """Counts and maxima to the bit, sums to the rounding of fp64."""
    whole = OriginGaps.zeros(BUCKETS)
    whole.add(*tensors(tokens))
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    ranks = [OriginGaps.zeros(BUCKETS), OriginGaps.zeros(BUCKETS)]
    for number, (start, end) in enumerate(pairwise(bounds)):
        ranks[number % 2].add(*tensors(tokens[start:end]))
    sums = ranks[0].sums_BK.flatten() + ranks[1].sums_BK.flatten()
    total = OriginGaps.from_vectors(sums, torch.maximum(ranks[0].maxima_B, ranks[1].maxima_B))
    ranks[0].merge(ranks[1])
    for found in (total, ranks[0]):
        assert torch.equal(found.maxima_B, whole.maxima_B)
        assert torch.equal(found.sums_BK[:, KEYS.index("tokens")], whole.sums_BK[:, KEYS.index("tokens")])
        torch.testing.assert_close(found.sums_BK, whole.sums_BK, rtol=1e-12, atol=1e-12)


def test_what_is_masked_is_ignored_and_a_huge_ratio_stays_finite() -> None:
    gaps = OriginGaps.zeros(2)
    engine_R, trainer_R = torch.tensor([math.nan, -1.0, -200.0]), torch.tensor([-1.0, -math.inf, -1.0])
    gaps.add(engine_R, trainer_R, torch.tensor([False, False, True]), torch.tensor([0, 0, 1]))
    assert gap_of(gaps, 0).tokens == 0 and not gaps.sums_BK[0].any()
    assert torch.isfinite(gaps.sums_BK).all() and gap_of(gaps, 1).logprob_abs_diff == 199.0


def test_the_tail_begins_beyond_a_factor_of_two() -> None:
    gaps = OriginGaps.zeros(1)
    difference_R = torch.tensor([TAIL - 1e-6, TAIL + 1e-6, -TAIL - 1e-6, 0.0], dtype=torch.float64)
    keep_R, source_R = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    gaps.add(torch.zeros(4, dtype=torch.float64), difference_R, keep_R, source_R)
    assert gap_of(gaps, 0).tail == 0.5
