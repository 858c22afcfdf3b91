"""Engine output to trajectories: what cannot be trained on is marked, never averaged."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.routes import Routes, RoutesSpec
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rewards.types import RewardResult
from megarl.rollout.agents.trajectory_builder import (
    check_trajectory,
    defect,
    dialogue_trajectory,
    fail_without_routes,
    failed_trajectory,
    trajectory,
)
from megarl.rollout.engine.messages import GenerateResult, request_seed
from tests.support.rollout.declared_streams import EVERY_DTYPE, declared

GOOD = GenerateResult("r", [5, 6, 2], [-0.5, -1.25, 0.0], (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)), "stop", 0)


def test_a_sound_sample_keeps_tokens_logprobs_and_versions() -> None:
    row = trajectory(7, 1, [1, 2], GOOD, RewardResult(0.5, {"parsed": 1.0}))
    assert (row.key, row.status, row.failure, row.oldest_version) == ("7:1", "ok", "", 3)
    assert (row.prompt_ids, row.response_ids, row.rollout_logprobs) == ([1, 2], [5, 6, 2], [-0.5, -1.25, 0.0])
    assert (row.reward, row.reward_components) == (0.5, {"parsed": 1.0})


def test_a_sample_without_a_reward_has_failed_unless_on_error_gives_it_one() -> None:
    late = RewardResult(0.0, error="timeout: no reward after 10 s", reason="timeout", dropped=True)
    row = trajectory(7, 1, [1, 2], GOOD, late)
    assert (row.status, row.failure, row.reward_error) == ("failed", late.error, late.error)
    row = trajectory(7, 1, [1, 2], GOOD, replace(late, score=-0.5, dropped=False))
    assert (row.status, row.failure, row.reward_error, row.reward) == ("ok", "", late.error, -0.5)
    aborted = trajectory(7, 1, [1, 2], replace(GOOD, finish_reason="abort"), late)
    assert (aborted.failure, aborted.reward_error) == ("aborted", late.error)


SPEC = RoutesSpec(layers=2, topk=2, experts=300)


def experts(tokens: int, first: int = 0) -> Routes:
    """Of tokens with numbers from `first` on."""
    numbers = np.arange(first, first + tokens, dtype=np.uint16)
    return Routes(np.stack([numbers, numbers + 100], -1)[:, None].repeat(2, 1))


@pytest.mark.parametrize("known", [0, 3, 4])
def test_the_experts_of_a_dialogue_are_those_with_which_each_token_was_read(known: int) -> None:
    """A later turn reads again what came before; what the earlier turns said of it stays, if it is returned again."""
    again = Routes(np.concatenate([experts(4, 50).experts_TLK, experts(5, 4).experts_TLK])).of(known)
    turns = [replace(GOOD, routes=experts(4)), replace(GOOD, routes=again)]  # prompts of 2, and 2 + 3 + 2 tokens
    row = dialogue_trajectory(7, 1, [1, 2], turns, [[8, 9]], RewardResult(1.0), finish_reason="stop")
    assert len(row.prompt_ids + row.response_ids) == 10 and row.routes == experts(9)
    assert fail_without_routes([row], SPEC) == [row]
    turns[1] = replace(GOOD, routes=experts(4, 5))  # one is missing
    row = dialogue_trajectory(7, 1, [1, 2], turns, [[8, 9]], RewardResult(1.0), finish_reason="stop")
    assert "shape [8, 2, 2], not [9, 2, 2]" in fail_without_routes([row], SPEC)[0].failure


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        (None, "no experts to replay"),
        (experts(3), r"shape \[3, 2, 2\], not \[4, 2, 2\]"),
        (experts(5), r"shape \[5, 2, 2\], not \[4, 2, 2\]"),
        (Routes(experts(4).experts_TLK[:, :1]), r"shape \[4, 1, 2\]"),
        (Routes(experts(4).experts_TLK[..., :1]), r"shape \[4, 2, 1\]"),
        (experts(4, 197), "expert 300 of 300"),
        (Routes(experts(4).experts_TLK % 100), "an expert twice"),
    ],
)
def test_a_sample_whose_experts_cannot_be_replayed_has_failed(routes: Routes | None, problem: str) -> None:
    row = trajectory(7, 1, [1, 2], replace(GOOD, routes=routes), RewardResult(1.0))
    sound = replace(row, routes=experts(4))
    assert fail_without_routes([sound], SPEC) == [sound]
    failed = fail_without_routes([sound, row], SPEC)
    assert [each.status for each in failed] == ["failed", "failed"] and re.search(problem, failed[0].failure)
    assert failed[1] == replace(row, status="failed", failure=failed[0].failure)


def test_rewards_of_turns_stand_at_the_first_tokens_of_the_turns() -> None:
    by_turn = RewardResult(1.0, turn_rewards=(0.5, -0.5))
    row = dialogue_trajectory(7, 1, [1], [GOOD, GOOD], [[8, 9]], by_turn, finish_reason="stop")
    assert (row.turn_rewards, row.turn_starts) == ([0.5, -0.5], [0, 5])
    assert (row.tag.turn_rewards, row.tag.turn_starts) == ([0.5, -0.5], [0, 5])
    check_trajectory(row, 7, 1)
    plain = dialogue_trajectory(7, 1, [1], [GOOD, GOOD], [[8, 9]], RewardResult(1.0), finish_reason="stop")
    assert plain == replace(row, turn_rewards=[], turn_starts=[])
    single = trajectory(7, 1, [1], GOOD, RewardResult(1.0, turn_rewards=(0.5,)))
    assert (single.turn_rewards, single.turn_starts) == ([0.5], [0])
    with pytest.raises(ValueError, match="sample 7:1 has rewards for 2 turns, but the model had 1: an agent loop must"):
        trajectory(7, 1, [1], GOOD, by_turn)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -9999.0])
def test_a_bad_logprob_fails_the_sample(value: float) -> None:
    bad = replace(GOOD, logprobs=[-0.5, value, 0.0])
    row = trajectory(0, 0, [1], bad, None)
    assert row.status == "failed" and "response token 1" in row.failure and row.reward == 0.0
    assert row.has_bad_logprobs and row.tag.bad_logprobs
    assert row.response_ids == GOOD.response_ids and repr(row.rollout_logprobs) == repr(bad.logprobs), "to be looked at"


def test_other_failures_are_no_matter_of_logprobs() -> None:
    aborted = trajectory(0, 0, [1], replace(GOOD, finish_reason="abort"), None)
    assert aborted.status == "failed" and not aborted.tag.bad_logprobs
    assert not failed_trajectory(0, 0, "late").tag.bad_logprobs
    assert not trajectory(7, 1, [1, 2], GOOD, RewardResult(0.5)).tag.bad_logprobs


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


# Three response tokens, of which the second was inserted by the agent loop and has neither log-prob nor version.
LOOPED = Trajectory(
    group_id=7,
    sample_index=1,
    prompt_ids=[1, 2],
    response_ids=[5, 60, 2],
    rollout_logprobs=[-0.5, 0.0, -1.0],
    versions=(VersionSpan(3, 0, 1), VersionSpan(4, 2, 3)),
    finish_reason="stop",
    reward=1.0,
    response_mask=[1, 0, 1],
)


def fault(row: Trajectory) -> str:
    """Return what is wrong with the trajectory of sample 7:1; empty if nothing is."""
    try:
        check_trajectory(row, 7, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_sound_trajectory_of_a_loop_passes() -> None:
    assert fault(LOOPED) == ""
    with declared(*EVERY_DTYPE):
        assert fault(replace(LOOPED, streams={"test_weight": [0.5] * 3, "test_expert": [1] * 3})) == ""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_id": 8}, "the agent loop of sample 7:1 returned a trajectory of 8:1"),
        ({"sample_index": 0}, "the agent loop of sample 7:1 returned a trajectory of 7:0"),
        ({"response_mask": [1, 0]}, "sample 7:1: response_mask has 2 values for 3 response tokens"),
        ({"rollout_logprobs": [0.0] * 4}, "sample 7:1: rollout_logprobs has 4 values for 3 response tokens"),
        (
            {"streams": {"advantages": [0.0] * 3}},
            "sample 7:1: stream 'advantages' is made by the trainer, not by an agent loop",
        ),
        ({"streams": {"test_weight": [0.0]}}, "sample 7:1: stream 'test_weight' has 1 values for 3 response tokens"),
        ({"turn_rewards": [1.0]}, "sample 7:1: 1 turn_rewards, but 0 turn_starts"),
        (
            {"turn_rewards": [1.0, 2.0], "turn_starts": [0, 3]},
            "sample 7:1: turn_starts [0, 3] do not rise within 3 response tokens",
        ),
        (
            {"turn_rewards": [math.inf], "turn_starts": [0]},
            "sample 7:1: a reward of a turn is not finite: [inf]",
        ),
        ({"versions": (VersionSpan(3, 0, 1),)}, "sample 7:1: no weight version for response token 2"),
        ({"response_mask": [1, 1, 1]}, "sample 7:1: no weight version for response token 1"),
        (
            {"response_ids": [], "rollout_logprobs": [], "response_mask": [], "versions": ()},
            "sample 7:1: no response token",
        ),
    ],
)
def test_a_faulty_trajectory_of_a_loop_is_named(changed: dict, message: str) -> None:
    with declared():
        assert fault(replace(LOOPED, **changed)) == message


def test_a_stream_that_nobody_declared_is_named() -> None:
    with pytest.raises(KeyError, match="stream 'test_weight' is not declared"):
        fault(replace(LOOPED, streams={"test_weight": [0.0] * 3}))


def test_a_failed_trajectory_needs_neither_tokens_nor_versions() -> None:
    assert fault(failed_trajectory(7, 1, "no answer")) == ""
    assert fault(replace(LOOPED, status="failed", versions=())) == ""


SPANS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4)


@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), SPANS)
def test_the_first_sampled_token_without_version_is_found(mask: list[int], ends: list[tuple[int, int]]) -> None:
    """Whatever order the spans have, and if they overlap or are empty."""
    spans = tuple(VersionSpan(3, *each) for each in ends if each[0] <= each[1])
    covered = {token for span in spans for token in range(span.start, span.end)}
    missing = [token for token, sampled in enumerate(mask) if sampled and token not in covered]
    row = replace(LOOPED, response_ids=[5] * len(mask), rollout_logprobs=[-1.0] * len(mask), response_mask=mask)
    found = fault(replace(row, versions=spans))
    assert found == (f"sample 7:1: no weight version for response token {missing[0]}" if missing else "")


@pytest.mark.parametrize("value", [True, np.float32(1.0), "1", None])
def test_a_reward_of_a_loop_is_a_number(value: Any) -> None:
    name = type(value).__name__
    assert f"sample 7:1: the agent loop returned reward as a {name}" in fault(replace(LOOPED, reward=value))
    assert f"returned style as a {name}" in fault(replace(LOOPED, reward_components={"style": value}))
    assert fault(replace(LOOPED, reward=1, reward_components={"style": np.float64(0.5)})) == ""
