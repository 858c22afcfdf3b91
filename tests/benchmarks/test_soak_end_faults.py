"""Faults after which a run has to end: what is looked at before the job is started again, and after that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

import psutil
import pytest

from benchmarks.soak_disk import FILLER
from benchmarks.soak_faults import Injector
from benchmarks.soak_happened import Happened
from benchmarks.soak_kinds import ABORTED_END, KINDS
from benchmarks.soak_orders import EVALUATED, HOLD, WATCH_EVALUATION, give, take
from benchmarks.soak_variant import checkpoints_of, orders_of
from tests.support.faulted_run import Run, fault_of
from tests.support.waiting import wait_until


class Job(Run):
    """A run whose job ends as a test says, and is started again when the fault has looked at that."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory, monkeypatch)
        self.said: list[str] = []

    def tell(self, text: str) -> None:
        with self.directory.with_suffix(".log").open("a") as log:
            log.write(f"{text}\n")

    def write(self, name: str, **content: Any) -> None:
        (self.directory / name).write_text(json.dumps(content))

    @property
    def judged(self) -> bool:
        ends = ("two more steps", "did NOT end")
        return any(text.startswith("step") and any(each in text for each in ends) for text in self.said)

    def save(self, name: str) -> None:
        checkpoint = checkpoints_of(self.directory, [KINDS[name]]) / f"iter_{self.steps:07d}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").touch()

    def let_happen(self, name: str, end: Callable[[], int], restart: Callable[[], object], index: int = 0) -> Happened:
        """Let a fault happen, end the job with the code of `end`, `restart` it, and return what was made of that."""
        self.step()
        self.save(name)
        injector = Injector(self.directory, [fault_of(name, index)], replicas=2, say=self.said.append)

        def job() -> None:
            code = end()
            for each in self.workers:
                each.kill()
            injector.ends.ended(code)
            assert not (self.directory / FILLER).exists(), "the disk is still full"
            self.agent, self.restarts = psutil.Process(os.getppid()), 0
            self.workers = [self.start().engine]
            restart()

        wait_until(lambda: bool(injector.happened), 30, "the fault")
        thread = threading.Thread(target=job, daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive(), 30, "the next start")
        deadline = time.monotonic() + 30
        while not KINDS[name].at_end and not self.judged and time.monotonic() < deadline:
            self.step()
            self.save(name)
            time.sleep(0.05)
        thread.join(10)
        assert injector.stop() == ""
        return injector.happened[0]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    directory = tmp_path / "run"
    directory.mkdir()
    living = Job(directory, monkeypatch)
    monkeypatch.setattr("soak_end_faults.fill_up", lambda path: (path / FILLER).touch())
    monkeypatch.setattr("soak_watch.WatchedRun.NOTICE_S", 2.0)
    yield living
    living.close()


def failed(job: Job, reason: str, *, messages: int = 1, code: int = 1) -> int:
    for _ in range(messages):
        job.tell(f"megarl: {reason}\n(rank 0 on here; traceback in the log)")
        job.tell(f"megarl: node 10.0.0.1 failed: {reason} (rank 0 on here; traceback in the log)")  # said by its agent
    job.write("exit.json", status="failed", step=1, reason=reason)
    return code


def resume(job: Job, step: int = 1) -> None:
    job.tell(f"resuming from iter_{step}, {step} steps done")


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("messages", "code", "reason", "told"),
    [
        (1, 1, FULL, ""),
        (2, 1, FULL, "2 messages were told, NOT 1"),
        (0, 1, FULL, "0 messages were told, NOT 1"),
        (1, 0, FULL, "the code is NOT 1"),
        (1, 1, "something", "its reason does NOT have: No space left on device"),
    ],
)
def test_a_run_whose_disk_stays_full_ends_with_one_message_and_goes_on_when_there_is_space(
    job: Job, messages: int, code: int, reason: str, told: str
) -> None:
    def end() -> int:
        wait_until((job.directory / FILLER).exists, 10, "the full disk")
        return failed(job, reason, messages=messages, code=code)

    event = job.let_happen("exhaust-disk", end, lambda: resume(job))
    assert event.over == (not told) and told in str(event), str(event)
    assert "run was full for" in str(event)


def test_each_start_of_the_ranks_that_torchrun_has_left_may_tell_its_own_message(job: Job) -> None:
    job.left = 2
    event = job.let_happen("exhaust-disk", lambda: failed(job, FULL, messages=3), lambda: resume(job))
    assert event.over, str(event)


def test_a_run_that_begins_anew_in_place_of_its_checkpoint_has_not_survived(job: Job) -> None:
    event = job.let_happen("exhaust-disk", lambda: failed(job, FULL), lambda: None)
    assert not event.over and "step 1, that of the newest checkpoint, was NOT resumed" in str(event)


@pytest.mark.parametrize(("left", "code"), [(0, 1), (3, 0)])
@pytest.mark.parametrize(("unsaved", "resumed", "told"), [
    (2, 1, ""), (0, 1, "does NOT count the steps that are not saved"),
    (2, 0, "step 1, that of the newest checkpoint, was NOT resumed"),
])  # fmt: skip
def test_when_saves_fail_the_stop_says_what_is_lost_and_the_step_that_is_saved_is_resumed(
    job: Job, left: int, code: int, unsaved: int, resumed: int, told: str
) -> None:
    checkpoints = job.directory.with_suffix(".checkpoints")
    job.tell("resuming from iter_1, 1 steps done")  # by an earlier start
    job.left = left

    def end() -> int:
        wait_until((checkpoints / FILLER).exists, 10, "the full disk")
        assert not (job.directory / "stop").exists(), "no save has failed yet"
        (checkpoints / FILLER).unlink()  # by which a save that has failed makes room
        wait_until((checkpoints / FILLER).exists, 10, "what it has freed to be taken too")
        job.tell("the checkpoint of step 5 could NOT be saved: no space")
        wait_until((job.directory / "stop").exists, 10, "the request to stop")
        reason = "the time limit is near; the checkpoint of step 6 could not be saved: no space"
        job.write("exit.json", status="preempted", step=1, reason=reason, unsaved_steps=unsaved)
        job.write("summary.json", failed_saves=2)
        return code

    event = job.let_happen("exhaust-checkpoint-disk", end, lambda: resume(job, resumed))
    assert event.over == (not told) and told in str(event), str(event)


@pytest.mark.parametrize("kept", [True, False])
def test_more_steps_are_spoiled_than_may_be_skipped_until_the_run_has_ended(job: Job, kept: bool) -> None:
    orders, reason = orders_of(job.directory), f"step 3: nan; the batch is kept in {job.directory}/failed_batch"

    def end() -> int:
        for _ in range(3):
            wait_until(lambda: take(orders, "gradient"), 10, "the order")
        if kept:
            (job.directory / "failed_batch" / "batch").mkdir(parents=True)
        job.tell("the gradient norm is nan; the step is skipped (1 of at most 2)")
        return failed(job, reason)

    event = job.let_happen("spoil-steps", end, lambda: resume(job))
    assert event.over == kept and event.spoiled == 3, str(event)
    assert not (orders / "gradient").exists(), "the cause has not gone"


# It tells each stop signal, and ends at none.
TELLS = (
    "import signal, time\nfor each in signal.SIGINT, signal.SIGTERM:\n"
    "    signal.signal(each, lambda number, frame: print(number, flush=True))\nprint('ready', flush=True)\n"
    "while True: time.sleep(600)"
)


@pytest.fixture
def torchrun(job: Job, monkeypatch: pytest.MonkeyPatch) -> psutil.Popen:
    """A process group of its own, as that of torchrun: part of the job, and gone when the job has ended."""
    monkeypatch.setattr("soak_end_faults.AGAIN_S", 0.8)  # two signals that a busy process has not taken become one
    ending = replace(ABORTED_END, within_s=25.0)
    monkeypatch.setitem(KINDS, "abort-job", replace(KINDS["abort-job"], ending=ending))
    group = psutil.Popen([sys.executable, "-c", TELLS], start_new_session=True, stdout=subprocess.PIPE, text=True)
    job.started.append(group)
    assert group.stdout.readline() == "ready\n"
    job.workers, job.agent = [*job.workers, group], group
    return group


@pytest.mark.parametrize(
    ("index", "messages", "code", "status", "reason", "traceback", "told"),
    [
        (0, 1, 1, "failed", "aborted by a second stop signal (SIGTERM)", False, ""),
        (1, 1, 1, "failed", "aborted by a second stop signal (SIGTERM)", False, ""),
        (1, 1, 1, "failed", "SIGTERM", False, "its reason does NOT have: aborted by a second stop signal (SIGTERM)"),
        (0, 1, 0, "failed", "aborted by a second stop signal (SIGTERM)", False, "the code is NOT 1"),
        (0, 1, 0, "preempted", "SIGINT", False, "exit.json does NOT say failed"),
        (0, 0, 1, "failed", "aborted by a second stop signal (SIGTERM)", False, "0 messages were told, NOT 1"),
        (0, 2, 1, "failed", "aborted by a second stop signal (SIGTERM)", False, "2 messages were told, NOT 1"),
        (0, 1, 1, "failed", "aborted by a second stop signal (SIGTERM)", True, "a traceback was told"),
    ],
)
def test_a_second_stop_signal_in_a_step_ends_the_job_which_names_it_and_is_resumed(
    job: Job, torchrun: psutil.Popen, index: int, messages: int, code: int, status: str, reason: str, traceback: bool,
    told: str,
) -> None:  # fmt: skip
    job.left = 3  # restarts, of which torchrun makes none
    number = [Signals.SIGINT, Signals.SIGTERM][index]

    def end() -> int:
        wait_until(lambda: take(orders_of(job.directory), HOLD), 10, "the order that holds a step up")
        assert [int(torchrun.stdout.readline()) for _ in range(2)] == [number] * 2
        for _ in range(messages):
            job.tell(f"megarl: {reason}; the same command resumes after step 1")
        if traceback:
            job.tell("Traceback (most recent call last):")
        job.write("exit.json", status=status, step=1, reason=reason)
        return code

    event = job.let_happen("abort-job", end, lambda: resume(job), index)
    assert event.over == (not told) and told in str(event), str(event)
    assert f"the second {number.name} came" in str(event)
    assert not (orders_of(job.directory) / HOLD).exists()


def test_a_job_is_aborted_only_if_all_its_processes_have_ended(
    job: Job, torchrun: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "abort-job", replace(KINDS["abort-job"], ending=replace(ABORTED_END, within_s=3.0)))

    def end() -> int:
        wait_until(lambda: take(orders_of(job.directory), HOLD), 10, "the order that holds a step up")
        assert [int(torchrun.stdout.readline()) for _ in range(2)] == [Signals.SIGINT] * 2
        job.workers.remove(torchrun)  # which goes on
        return 1

    event = job.let_happen("abort-job", end, lambda: resume(job))
    assert not event.over and "the job did NOT end within 3 s" in str(event)


def test_a_job_in_which_no_step_is_held_up_gets_no_signal(
    job: Job, torchrun: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "abort-job", replace(KINDS["abort-job"], ending=replace(ABORTED_END, within_s=5.0)))

    def end() -> int:
        wait_until(lambda: not (orders_of(job.directory) / HOLD).exists(), 10, "the order to be withdrawn")
        return 1

    give(orders_of(job.directory), HOLD)
    event = job.let_happen("abort-job", end, lambda: resume(job))
    assert not event.over and "NO step was held up" in str(event) and "came" not in str(event)
    torchrun.kill()
    assert torchrun.stdout.read() == ""


@pytest.mark.parametrize(("status", "again"), [("finished", False), ("finished", True), ("failed", False)])
def test_a_time_limit_in_the_final_evaluation_makes_no_step_again(job: Job, status: str, again: bool) -> None:
    orders = orders_of(job.directory)
    give(orders, EVALUATED)  # by the first evaluation

    def end() -> int:
        wait_until((orders / WATCH_EVALUATION).exists, 10, "the order to watch it")
        assert not (job.directory / "stop").exists(), "it has not begun"
        give(orders, EVALUATED)
        wait_until((job.directory / "stop").exists, 10, "the request to stop")
        job.tell("the evaluation (after) was ended by a stop request")
        job.write("exit.json", status="preempted", step=1, reason="the time limit is near")
        return 0

    def restart() -> None:
        job.write("exit.json", status=status, step=1, reason="")
        job.write("summary.json", eval_after={"n": 8})
        if again:
            job.step()

    event = job.let_happen("limit-evaluation", end, restart)
    assert event.over == (status == "finished" and not again), str(event)
    assert not (orders / WATCH_EVALUATION).exists()


def test_every_kind_that_ends_a_run_says_how_and_may_start_it_again() -> None:
    ending = {name for name, kind in KINDS.items() if kind.ending is not None}
    assert ending == {
        "exhaust-checkpoint-disk",
        "exhaust-disk",
        "spoil-steps",
        "limit-evaluation",
        "sever-link",
        "abort-job",
    }
    assert all(KINDS[name].starts == 1 and not KINDS[name].has_processes for name in ending)
    assert [name for name, kind in KINDS.items() if kind.at_end] == ["limit-evaluation"]


def test_saves_fail_only_when_there_is_a_checkpoint_to_go_on_from(job: Job) -> None:
    job.step()
    injector = Injector(job.directory, [fault_of("exhaust-checkpoint-disk")], replicas=2, say=job.said.append)
    time.sleep(0.3)
    assert injector.stop() == "" and not injector.happened
