"""Engine output to trajectories: what cannot be trained on is marked, never averaged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megarl.queue.trajectory import VersionSpan
from megarl.rewards.types import RewardOutcome
from megarl.rollout.requests import GenerateResult, request_seed
from megarl.rollout.to_trajectory import defect, trajectory

GOOD = GenerateResult("r", [5, 6, 2], [-0.5, -1.25, 0.0], (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), "stop", 0)


def test_a_sound_sample_keeps_tokens_logprobs_and_versions() -> None:
    row = trajectory(7, 1, [1, 2], GOOD, RewardOutcome(0.5, {"parsed": 1.0}))
    assert (row.key, row.status, row.failure, row.oldest_version) == ("7:1", "ok", "", 3)
    assert (row.prompt_ids, row.response_ids, row.rollout_logprobs) == ([1, 2], [5, 6, 2], [-0.5, -1.25, 0.0])
    assert (row.reward, row.reward_components) == (0.5, {"parsed": 1.0})


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0])
def test_a_bad_logprob_fails_the_sample(value: float) -> None:
    bad = replace(GOOD, logprobs=[-0.5, value, 0.0])
    row = trajectory(0, 0, [1], bad, None)
    assert row.status == "failed" and "response token 1" in row.failure and row.reward == 0.0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"response_ids": [], "logprobs": [], "versions": ()}, "empty response"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"versions": ()}, "cover 0 of 3"),
        ({"versions": (VersionSpan(3, 0, 2),)}, "cover 2 of 3"),
        ({"versions": (VersionSpan(3, 1, 3),)}, "no weight version for response token 0"),
    ],
)
def test_other_defects(changed: dict, reason: str) -> None:
    assert reason in defect(replace(GOOD, **changed))


def test_a_sound_sample_without_a_judgement_is_a_bug() -> None:
    with pytest.raises(ValueError, match="not judged"):
        trajectory(0, 0, [1], GOOD, None)


def test_seeds_depend_on_run_group_and_sample_only() -> None:
    seeds = {request_seed(run, group, sample) for run in range(4) for group in range(40) for sample in range(8)}
    assert len(seeds) == 4 * 40 * 8 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(0, 0, 0) == 4808561972376111626
