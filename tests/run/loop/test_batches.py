"""Batches that are prepared a step early: when that happens, what a failure becomes, and that a stop never hangs."""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import RolloutError
from megarl.run.loop import batches
from megarl.run.loop.batches import PreparedBatch
from megarl.run.loop.loop import train
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.fake_session import FakeRun, fake_run

AHEAD = {"mode": "async", "sync_interval": 2, "max_staleness": 3}
WAIT_S = 60.0  # for what comes in a moment
HELD_S = 600.0  # longer than a test may take


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRun]:
    def make(steps: int, **changes: Any) -> FakeRun:
        settings = {"run__dir": str(tmp_path), "run__export": False, "admission": AHEAD, "timeouts__shutdown_s": 10}
        return fake_run(config_of("model", run__steps=steps, **settings | changes), monkeypatch)

    return make


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def preparing() -> list[str]:
    """The names of the threads that prepare a batch."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prepare-batch")]


def test_the_next_batch_is_fetched_by_another_thread_while_a_step_trains(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(3)
    fetched_by: dict[str, str] = {}
    run.fetching = lambda plan: fetched_by.update({plan: threading.current_thread().name})
    early: list[bool] = []

    def step() -> None:
        following = len(early) + 1
        early.append(following == 3 or wait_for(lambda: f"fetch plan for version {following}" in run.journal))

    run.train = step
    train(run.build())
    assert early == [True, True, True]
    assert fetched_by == {f"plan for version {step}": f"prepare-batch-{step}" for step in range(3)}
    assert [line for line in run.journal if line.startswith("take")] == [
        f"take batch {step} for version {step}" for step in range(3)
    ], "each batch is taken once, and none beyond the last step"


def test_no_more_than_the_batch_that_trains_and_the_next_one_are_in_memory(
    make_run: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[PreparedBatch]] = []
    training, fetching = [], []

    def alive() -> int:
        return len([ref for ref in list(made) if ref() is not None])

    class Watched(PreparedBatch):
        def __init__(self, *parts: Any, **others: Any) -> None:
            super().__init__(*parts, **others)
            made.append(weakref.ref(self))

    monkeypatch.setattr(batches, "PreparedBatch", Watched)
    run = make_run(6)

    def step() -> None:
        following = len(training) + 1
        assert following == 6 or wait_for(lambda: f"fetch plan for version {following}" in run.journal)
        training.append(alive())

    run.train, run.fetching = step, lambda plan: fetching.append(alive())
    train(run.build())
    assert training == [2, 2, 2, 2, 2, 1] and fetching == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("updates", [1, 2])
def test_synchronous_training_takes_no_batch_early(make_run: Callable[..., FakeRun], updates: int) -> None:
    """Nor does it start a thread: its batches are those of the weights that were just published."""
    run = make_run(3, admission={"mode": "sync"}, trainer__mini_batches=updates)
    taken: list[int] = []
    run.fetching = lambda plan: None if threading.current_thread() is threading.main_thread() else pytest.fail(plan)

    def step() -> None:
        taken.append(sum(line.startswith("take") for line in run.journal))
        assert not preparing()

    run.train = step
    train(run.build())
    assert taken == [1, 2, 3]


def test_a_failed_preparation_is_raised_by_the_step_that_needs_it(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(4)
    failure, failed = RolloutError("replica 0: out of memory"), threading.Event()

    def taking(step: int) -> None:
        if step == 2:
            failed.set()
            raise failure

    def step() -> None:
        assert run.journal.count("commit 0") == 0 or failed.wait(WAIT_S), "the failure precedes the end of step 1"

    run.taking, run.train = taking, step
    session = run.build()
    with pytest.raises(RolloutError) as caught:
        train(session)
    assert caught.value is failure
    assert [line for line in run.journal if line.startswith("commit")] == ["commit 0", "commit 1"]
    session.close()
    assert "end the pool" in run.journal


def test_a_stop_ends_the_wait_for_a_batch_that_nobody_will_train(make_run: Callable[..., FakeRun]) -> None:
    """It is not committed, so the run that resumes draws its groups again."""
    run = make_run(5)
    run.stop_after = {2: "SIGTERM"}
    waiting = threading.Event()

    def taking(step: int) -> None:
        if step == 2:
            waiting.set()
            assert run.channel.closed.wait(WAIT_S), "nothing ended the wait"
            raise RolloutError("closed")

    run.taking = taking
    session = run.build()
    train(session)
    assert waiting.wait(WAIT_S) and session.stopped == "SIGTERM"
    session.finish()
    session.close()
    assert wait_for(lambda: not preparing())
    assert [line for line in run.journal if line.startswith("commit")] == ["commit 0", "commit 1"]


def test_the_failure_of_a_batch_that_nobody_needs_is_logged(
    make_run: Callable[..., FakeRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(3)
    run.stop_after = {1: "SIGTERM"}

    def taking(step: int) -> None:
        if step == 1:
            raise RolloutError("replica 0: out of memory")

    run.taking = taking
    session = run.build()
    train(session)
    with caplog.at_level(logging.WARNING):
        session.finish()
    assert (
        "the preparation of the next batch failed before it was ended" in caplog.text and "out of memory" in caplog.text
    )


def test_a_preparation_that_does_not_end_delays_the_end_by_no_more_than_its_bound(
    make_run: Callable[..., FakeRun], caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(3, timeouts__shutdown_s=0.1)
    run.stop_after = {1: "SIGTERM"}
    released = threading.Event()
    run.taking = lambda step: None if step < 1 else released.wait(HELD_S) and None
    session = run.build()
    train(session)
    with caplog.at_level(logging.WARNING):
        session.finish()
    assert "waited 0 s (timeouts.shutdown_s) for the next batch's thread" in caplog.text
    released.set()
    assert wait_for(lambda: not preparing())


def test_a_failed_rank_does_not_wait_for_the_others_before_it_reports(make_run: Callable[..., FakeRun]) -> None:
    """Its thread follows that of rank 0, which trains on and knows nothing of the failure."""
    run = make_run(3, timeouts__shutdown_s=HELD_S)
    released, waiting = threading.Event(), threading.Event()

    def taking(step: int) -> None:
        if step == 1:
            waiting.set()
            released.wait(HELD_S)

    def fail() -> None:
        assert waiting.wait(WAIT_S)
        raise ArithmeticError("nan")

    run.taking, run.train = taking, fail
    session = run.build()
    with pytest.raises(ArithmeticError):
        train(session)
    session.close(keep_pool=True)
    assert "disconnect" in run.journal
    released.set()
    assert wait_for(lambda: not preparing())


def test_the_wait_is_hurried_only_while_the_trainer_waits(make_run: Callable[..., FakeRun]) -> None:
    run = make_run(3)
    during: list[bool] = []
    run.train = lambda: during.append(run.channel.hurried.is_set())
    run.taking = lambda step: None if run.channel.hurried.wait(WAIT_S) else pytest.fail("the trainer never waited")
    train(run.build())
    assert during[:2] == [False, False]


@pytest.mark.parametrize(("found", "publications"), [(1, 1), (2, 2)])
def test_engines_that_the_publication_in_turn_has_brought_back_need_no_other_one(
    make_run: Callable[..., FakeRun], found: int, publications: int
) -> None:
    """A preparation that began before it says that a publication is needed, and is asked again."""
    run = make_run(3)
    run.lost = {2: found}
    run.train = lambda: None if "commit 0" not in run.journal else wait_for(lambda: run.lost[2] < found) and None
    train(run.build())
    assert run.journal.count("publish 2") == publications
    assert [line for line in run.journal if line.startswith("commit")] == ["commit 0", "commit 1", "commit 2"]
