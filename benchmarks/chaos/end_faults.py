"""Faults after which a run has to end: it must say why, and go on by the same command when the cause has gone.

While such a fault lasts, the job is not started again (below), so that its end can be looked at: the exit
code, exit.json, summary.json, and what it has told. Then the cause is taken away.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import EVALUATED, HOLD, WATCH_EVALUATION, give, taken, withdraw
from benchmarks.chaos.part_faults import AGAIN_S, SIGNALS
from benchmarks.chaos.place import SeveralHosts
from benchmarks.chaos.processes import ended
from benchmarks.chaos.watch import Survival, WatchedRun
from benchmarks.lib.file_faults import FILLER, complete, fill_up

FINISH_S = 600.0  # for a run that has only its final evaluation left
MESSAGE = "\n(rank "  # in the one message of a run that has failed, not where an agent repeats it
GO_ON = "; the same command "  # in the one message of a run that was aborted
TRACEBACK = "Traceback (most recent call last)"


class EndFaults:
    """Makes the run that is watched end."""

    def __init__(self, watch: WatchedRun, ends: JobEnds, place: SeveralHosts | None = None) -> None:
        """`place`: the hosts of the run, if it has several."""
        self._watch, self._ends, self._place = watch, ends, place

    def hit(self, fault: Fault) -> Happened | None:
        """Let a fault happen; return it when the run has ended and gone on, or None if nothing runs."""
        watch = self._watch
        if not watch.found(fault, lambda: watch.find_processes("job")):
            return None
        assert fault.kind.ending is not None, "a kind of these faults says how the run must end"
        within_s = fault.kind.ending.within_s
        hit, survival, restarts_left = watch.find_processes("job"), Survival(watch), watch.restarts_left
        event = watch.begin(fault, 0, f"torchrun might start the ranks {restarts_left} times more")
        causes = {
            "exhaust-checkpoint-disk": self._full_checkpoints,
            "exhaust-disk": self._full_run_dir,
            "spoil-steps": self._spoiled_steps,
            "abort-job": self._two_signals,
            "limit-evaluation": self._limited_evaluation,
            "sever-link": self._severed_link,
        }
        made = watch.records
        aborted = fault.kind.ending.aborted
        message = GO_ON if aborted else MESSAGE
        told_before, traces_before = watch.told(message), self._tracebacks
        with self._ends.awaited() as code, causes[fault.kind.name](event) as lasts:

            def over() -> bool:
                lasts()
                return code() is not None and (not aborted or ended(hit))

            if not watch.wait(over, within_s):
                event.notes.append(f"the job did NOT end within {within_s:.0f} s")
                return event
            event.notes.append(f"the job had ended {watch.seconds - event.at_s:.0f} s after it began")
            record = self._exit_record()
            problems = self._problems(event, code(), record, restarts_left, watch.told(message) - told_before)
            if aborted and self._tracebacks > traces_before:
                problems.append("a traceback was told")
            resumes = self._newest()
            resumed_before = watch.told(_resumed(resumes))
        event.notes += problems
        if fault.kind.at_end:
            event.over = self._finishes(event, made) and not problems
        else:
            goes_on = survival.judge(event, hit, "job")
            event.over = goes_on and self._resumes(event, resumes, resumed_before) and not problems
        return event

    # --- causes: each makes the run end, and is gone after the block. What is yielded keeps it up.

    @contextmanager
    def _full_checkpoints(self, event: Happened) -> Iterator[Callable[[], object]]:
        """No save succeeds any more; when one has failed, the run is asked to stop, so that its last one fails too."""
        asked = False

        def lasts() -> None:
            nonlocal asked
            fill_up(self._watch.checkpoints)  # what a save that has failed removes is taken too
            if not asked and self._watch.has_told(event):
                self._ask_to_stop()
                asked = True

        with self._full(event, self._watch.checkpoints):
            yield lasts

    @contextmanager
    def _full_run_dir(self, event: Happened) -> Iterator[Callable[[], object]]:
        with self._full(event, self._watch.run_dir):
            yield lambda: None

    @contextmanager
    def _full(self, event: Happened, directory: Path) -> Iterator[None]:
        since = self._watch.seconds
        try:
            fill_up(directory)
            yield
        finally:
            (directory / FILLER).unlink(missing_ok=True)
            event.notes.append(f"{directory.name} was full for {self._watch.seconds - since:.0f} s")

    @contextmanager
    def _spoiled_steps(self, event: Happened) -> Iterator[Callable[[], object]]:
        """Every step has a gradient that is NaN."""
        orders, name = self._watch.orders, "gradient"
        before = len(taken(orders, name))

        try:
            yield lambda: give(orders, name)
        finally:
            withdraw(orders, name)
            event.spoiled = len(taken(orders, name)) - before
            event.notes.append(f"{event.spoiled} gradients were spoiled")

    @contextmanager
    def _two_signals(self, event: Happened) -> Iterator[Callable[[], object]]:
        """In the middle of a step torchrun gets a stop signal twice: SIGINT or SIGTERM, by the index of the fault.

        The step is held up, or the run might save and end between the signals.
        """
        watch, number = self._watch, list(SIGNALS.values())[event.fault.index % len(SIGNALS)]
        before, agent = len(taken(watch.orders, HOLD)), watch.find_agent()
        give(watch.orders, HOLD)
        try:
            if agent is None or not watch.notices(lambda: len(taken(watch.orders, HOLD)) > before):
                event.notes.append("NO step was held up")
            else:
                with suppress(ProcessLookupError):  # the first signal alone has ended it
                    os.killpg(agent.pid, number)
                    watch.end.wait(AGAIN_S)
                    os.killpg(agent.pid, number)
                event.notes.append(f"the second {number.name} came {watch.seconds - event.at_s:.1f} s after it began")
            yield lambda: None
        finally:
            withdraw(watch.orders, HOLD)

    @contextmanager
    def _severed_link(self, event: Happened) -> Iterator[Callable[[], object]]:
        """The link between the trainer and all others is cut until the run has ended."""
        assert self._place is not None, "such a kind is drawn for several hosts only"
        with self._place.cut_link():
            yield lambda: None

    @contextmanager
    def _limited_evaluation(self, event: Happened) -> Iterator[Callable[[], object]]:
        """A stop request comes when the final evaluation has scored its first response."""
        orders = self._watch.orders
        asked = False
        withdraw(orders, EVALUATED)  # of the first evaluation
        give(orders, WATCH_EVALUATION)

        def lasts() -> None:
            nonlocal asked
            if not asked and (orders / EVALUATED).exists():
                self._ask_to_stop()
                asked = True

        try:
            yield lasts
        finally:
            withdraw(orders, WATCH_EVALUATION)
            withdraw(orders, EVALUATED)

    def _ask_to_stop(self) -> None:
        (self._watch.run_dir / "stop").write_text("the time limit is near\n", encoding="utf-8")

    # --- what the run must have done

    def _problems(
        self, event: Happened, code: int | None, record: dict[str, Any], restarts_left: int, messages: int
    ) -> list[str]:
        """Note how the run has ended; return what is not as the kind of the fault says.

        `messages`: how many it has told since the fault.
        """
        ending = event.fault.kind.ending
        assert ending is not None, "a kind of these faults says how the run must end"
        status, reason = record.get("status", "nothing"), str(record.get("reason", ""))
        event.notes.append(f"the job has ended with code {code}, exit.json says {status}, {reason[:300]!r}")
        wanted_code = 0 if ending.hidden_by_restarts and restarts_left else ending.code
        wanted_reasons = [each.format(run_dir=self._watch.run_dir) for each in ending.reasons]
        # Each start of the ranks that fails tells its own; a stop signal leaves torchrun none.
        starts = 1 if ending.aborted else restarts_left + 1
        wanted_messages = starts if ending.status == "failed" else 0
        checks = {
            f"the code is NOT {wanted_code}": code == wanted_code,
            f"exit.json does NOT say {ending.status}": status == ending.status,
            f"its reason does NOT have: {' or '.join(wanted_reasons)}": any(each in reason for each in wanted_reasons),
            f"{messages} messages were told, NOT {wanted_messages}": messages == wanted_messages,
            f"the run has NOT told: {event.fault.kind.told}": self._watch.has_told(event),
        }
        if event.fault.kind.action == "spoil":
            checks["failed_batch has NO batch"] = any((self._watch.run_dir / "failed_batch").glob("*"))
        if ending.saves_nothing:
            unsaved = int(record.get("unsaved_steps", 0))
            event.notes.append(f"{unsaved} steps are not saved")
            checks[f"exit.json does NOT name step {self._newest()}, to be resumed"] = (
                record.get("step") == self._newest()
            )
            checks["exit.json does NOT count the steps that are not saved"] = unsaved > 0
            checks["summary.json does NOT count the failed saves"] = self._summary().get("failed_saves", 0) > 0
        return [text for text, right in checks.items() if not right]

    def _newest(self) -> int:
        """Return the step of the newest complete checkpoint; such a fault waits until there is one."""
        return int(complete(self._watch.checkpoints)[-1].name.removeprefix("iter_"))

    def _resumes(self, event: Happened, step: int, before: int) -> bool:
        """Tell whether the run has resumed step `step`; `before`: how often it had told so when it had ended."""
        if self._watch.told(_resumed(step)) > before:
            return True
        event.notes.append(f"step {step}, that of the newest checkpoint, was NOT resumed")
        return False

    def _finishes(self, event: Happened, made: list[dict[str, Any]]) -> bool:
        """Wait for the end of a run that has all its steps; tell whether it has evaluated, and made none again."""
        self._watch.end.wait(FINISH_S)
        record, again = self._exit_record(), self._watch.records != made
        evaluated = bool(self._summary().get("eval_after"))
        event.recovered_s = self._watch.seconds - event.at_s
        event.notes.append(
            f"{event.recovered_s:.0f} s after it began the run is {record.get('status')}, "
            f"{'evaluated' if evaluated else 'NOT evaluated'}; {'steps were made AGAIN' if again else 'no step again'}"
        )
        return record.get("status") == "finished" and evaluated and not again

    @property
    def _tracebacks(self) -> int:
        """The number of tracebacks on the terminal: a part that is ended may have one in its own log."""
        log = self._watch.log
        return log.read_text(encoding="utf-8", errors="replace").count(TRACEBACK) if log.is_file() else 0

    def _exit_record(self) -> dict[str, Any]:
        return _read(self._watch.run_dir / "exit.json")

    def _summary(self) -> dict[str, Any]:
        return _read(self._watch.run_dir / "summary.json")


def _resumed(step: int) -> str:
    """Return what a run tells that resumes a step."""
    return f", {step} steps done"


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


LOOK_S = 120.0  # for the fault to look at the end of the job, and to take its cause away


class JobEnds:
    """The exit codes of a job, from who waits for its process to the fault that has made it end."""

    def __init__(self) -> None:
        self._codes: list[int] = []
        self._free = threading.Event()
        self._free.set()

    def ended(self, code: int) -> None:
        """Note that the job has ended; return when no fault looks at that (any more)."""
        self._codes.append(code)
        self._free.wait(LOOK_S)

    @contextmanager
    def awaited(self) -> Iterator[Callable[[], int | None]]:
        """Within the block, yield what tells the code with which the job has ended in it; it is not started again."""
        before = len(self._codes)
        self._free.clear()
        try:
            yield lambda: self._codes[before] if len(self._codes) > before else None
        finally:
            self._free.set()
