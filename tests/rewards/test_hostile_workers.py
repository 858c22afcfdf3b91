"""Workers that fork, flood, forge, grow and die: every sample gets its own reward or an error of its own."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rewards.types import RewardInput, RewardResult
from megarl.rewards.worker_pool import RewardPool, RewardPoolError
from tests.support.rewards.reward_pool import make_reward_pool, score_all, worker_pids
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MODULE = "tests.support.rewards.reward_functions"
TIMEOUT_S = 2.0
PATIENT_S = 120.0  # in which a worker starts on a busy machine


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """One worker and large batches, so that what one sample does would reach the next ones."""
    pool = make_reward_pool(f"{MODULE}:hostile", timeout_s=TIMEOUT_S, on_error="drop", memory_gib=1.0)
    asyncio.run(pool.start())
    yield pool
    pool.close()


def run(pool: RewardPool, *responses: str) -> list[RewardResult]:
    pool._sample_seconds = 1e-4  # as after many cheap samples
    return score_all(pool, [RewardInput("", each) for each in responses])


def ended(path: Path) -> bool:
    try:
        os.kill(int(path.read_text()), 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        ("flood", "a message of 2021161080 bytes"),
        ("garbage", "a message that is not an answer"),
        ("forge", "an answer for sample 1000000"),
        ("forge_nan", "an answer with the score nan"),
    ],
)
def test_what_is_no_answer_costs_a_worker_and_one_sample(pool: RewardPool, attack: str, sent: str) -> None:
    """The sample is scored a second time, because the cause may have been another one."""
    before = worker_pids(pool)
    outcomes = run(pool, "ok 1", f"{attack} 2", *(f"ok {number}" for number in range(3, 13)))
    assert [each.score for each in outcomes] == [1.0, 0.0, *map(float, range(3, 13))]
    assert [each.reason for each in outcomes] == [None, "foreign", *[None] * 10]
    assert outcomes[1].dropped and outcomes[1].redone == 1 and f"its process sent {sent}" in str(outcomes[1].error)
    assert worker_pids(pool) != before


def test_half_an_answer_is_waited_for_no_longer_than_a_whole_one(pool: RewardPool) -> None:
    outcomes = run(pool, "half", "ok 2")
    assert [each.reason for each in outcomes] == ["timeout", None] and outcomes[1].score == 2.0


def test_a_result_of_megabytes_is_refused_by_its_own_worker(pool: RewardPool) -> None:
    before = worker_pids(pool)
    long, other = run(pool, "long 1", "ok 2")
    assert long.reason == "invalid" and "bytes as JSON" in str(long.error) and other.score == 2.0
    assert worker_pids(pool) == before


def test_an_interrupt_of_the_function_is_an_error_of_its_sample(pool: RewardPool) -> None:
    before = worker_pids(pool)
    outcomes = run(pool, "interrupt", "ok 2")
    assert [each.reason for each in outcomes] == ["exception", None] and outcomes[1].score == 2.0
    assert worker_pids(pool) == before


def test_text_and_numbers_that_json_has_not_arrive(pool: RewardPool) -> None:
    (outcome,) = run(pool, "odd 3")
    assert (outcome.score, outcome.components, outcome.answer) == (3.0, {"café": float("inf")}, "?")


def test_memory_is_limited_and_the_worker_that_is_full_is_replaced() -> None:
    """Samples that leave memory behind fill a worker: the one that hits the limit is not the cause.

    A replaced worker starts within the time of its sample, so the pool has more of it than that of the other tests.
    """
    with contextlib.closing(
        make_reward_pool(f"{MODULE}:hostile", timeout_s=PATIENT_S, on_error="drop", memory_gib=1.0)
    ) as pool:
        asyncio.run(pool.start())
        outcomes = run(pool, "allocate", "ok 2", "leak 3", "leak 4", "leak 5", "leak 6")
    assert [each.score for each in outcomes] == [0.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert outcomes[0].reason == "memory" and "1 GiB (reward.memory_gib)" in str(outcomes[0].error)
    assert sum(each.redone for each in outcomes[1:]) >= 1


@pytest.mark.parametrize("how", ["child_crash", "child_apart"])
def test_children_end_with_their_worker(pool: RewardPool, tmp_path: Path, how: str) -> None:
    """The worker has died by itself, or the child has left its session."""
    (outcome,) = run(pool, f"{how} 1 {tmp_path / 'pid'}")
    assert outcome.reason == ("crash" if how == "child_crash" else "timeout")
    wait_until(lambda: ended(tmp_path / "pid"), 60, "the end of the child of a killed worker")


def test_a_worker_that_was_killed_costs_no_sample(pool: RewardPool, tmp_path: Path) -> None:
    outcomes = run(pool, "ok 1", f"crash_once 2 {tmp_path / 'once'}", "ok 3")
    assert outcomes == [RewardResult(1.0), RewardResult(2.0, redone=1), RewardResult(3.0)]


def test_a_stopped_worker_is_replaced(pool: RewardPool) -> None:
    run(pool, "ok")
    (pid,) = worker_pids(pool)
    os.kill(pid, signal.SIGSTOP)
    outcomes = run(pool, "ok 1", "ok 2", "ok 3")
    assert [each.reason for each in outcomes] == ["timeout", None, None]
    assert [each.score for each in outcomes[1:]] == [2.0, 3.0]


# --- functions that always fail


def test_the_first_failure_is_reported_with_the_traceback_and_the_limit_ends_the_pool() -> None:
    reported: list[str] = []
    pool = make_reward_pool(f"{MODULE}:broken", on_error="drop", max_error_share=0.5, report=reported.append)
    try:
        outcomes = run(pool, *["x"] * 15)
        assert {each.reason for each in outcomes} == {"exception"} and all(each.dropped for each in outcomes)
        assert len(reported) == 2 and "has failed for 10 samples" in reported[1]
        assert reported[0].startswith(f"reward function '{MODULE}:broken': exception no. 1: LookupError: the judge")
        assert "such samples are not trained on" in reported[0]
        assert reported[1].count("reward function") == 1 and "the latest: exception no. 10: Lookup" in reported[1]
        assert all(each in reported[0] for each in ('reward_functions.py", line', "in broken", "raise LookupError"))
        assert "worker.py" not in reported[0]  # the lines of the function, not those of the program that called it
        assert run(pool, "x")[0].dropped  # the 16th, which ends the pool
        with pytest.raises(RewardPoolError, match=r"broken' failed for 16 of the latest 16 samples") as ending:
            run(pool, "x")
        assert "LookupError: the judge has no key" in str(ending.value) and "in broken" in str(ending.value)
    finally:
        pool.close()


def test_a_function_that_never_returns_ends_the_pool_by_name() -> None:
    with contextlib.closing(
        make_reward_pool(f"{MODULE}:by_response", timeout_s=0.3, max_error_share=0.5, workers=2)
    ) as pool:
        futures = [pool.submit(RewardInput("", "hang")) for _ in range(24)]
        failed = [error for future in futures if (error := future.exception(timeout=60)) is not None]
        assert failed and all("by_response' failed for 16 of the latest 16 samples" in str(each) for each in failed)
        assert "timeout: no reward after 0.3 s" in str(failed[0])


def test_who_waits_is_told_for_which_function() -> None:
    with contextlib.closing(make_reward_pool(f"{MODULE}:by_response", timeout_s=60.0)) as pool:
        asyncio.run(pool.start())
        assert pool.waiting() == ""
        pool.submit(RewardInput("", "hang"))
        pool.submit(RewardInput("", "ok"))
        wait_until(lambda: "is running" in pool.waiting(), 60, "the first sample to be sent")
        assert pool.waiting().startswith("; waiting for the reward of 2 samples; reward function")
        assert "by_response' is running" in pool.waiting()


def test_a_component_whose_name_no_metric_can_have_is_refused() -> None:
    with contextlib.closing(make_reward_pool(f"{MODULE}:slashed")) as pool:
        (outcome,) = run(pool, "x")
        assert outcome.reason == "invalid"
        assert "component 'format/ok'" in str(outcome.error) and "'format_ok'" in str(outcome.error)
