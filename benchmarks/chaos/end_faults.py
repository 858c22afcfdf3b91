"""Faults after which a run has to end: it must say why, and go on by the same command when the cause has gone.

While such a fault lasts, the job is not started again (below), so that its end can be looked at: the exit
code, exit.json, summary.json, and what it has told. Then the cause is taken away.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from benchmarks.chaos.kinds import Ending, Fault, Happened
from benchmarks.chaos.orders import HOLD, give, taken, withdraw
from benchmarks.chaos.part_faults import AGAIN_S, SIGNALS
from benchmarks.chaos.place import SeveralHosts
from benchmarks.chaos.processes import ended
from benchmarks.chaos.watch import Judge, WatchedRun
from benchmarks.lib.file_faults import FILLER, complete, fill_up

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
        watch, ending = self._watch, fault.kind.ending
        if not watch.found(fault, lambda: watch.find_processes("job")):
            return None
        assert ending is not None, "a kind of these faults says how the run must end"
        hit, judge, restarts_left = watch.find_processes("job"), Judge(watch), watch.restarts_left
        event = watch.begin(fault, 0, f"torchrun might start the ranks {restarts_left} times more")
        causes = {"disk": self._full_run_dir, "job": self._two_signals, "link": self._severed_link}
        message = GO_ON if ending.aborted else MESSAGE
        told_before, traces_before = watch.told(message), self._tracebacks
        with self._ends.awaited() as codes, causes[fault.kind.target](event):
            if not watch.wait(lambda: bool(codes) and (not ending.aborted or ended(hit)), ending.within_s):
                event.notes.append(f"the job did NOT end within {ending.within_s:.0f} s")
                return event
            event.notes.append(f"the job had ended {watch.seconds - event.at_s:.0f} s after it began")
            # Each start of the ranks that fails tells its own message; a stop signal leaves torchrun none.
            starts = 1 if ending.aborted else restarts_left + 1
            problems = self._problems(event, ending, codes[0], watch.told(message) - told_before, starts)
            if ending.aborted and self._tracebacks > traces_before:
                problems.append("a traceback was told")
            resumes = f", {int(complete(watch.checkpoints)[-1].name.removeprefix('iter_'))} steps done"
            resumed_before = watch.told(resumes)
        event.over = judge.judge(event, hit)
        if watch.told(resumes) <= resumed_before:
            problems.append(f"the newest checkpoint was NOT resumed: {resumes.strip(', ')}")
        event.notes += problems
        event.over = event.over and not problems
        return event

    # --- causes: each makes the run end, and is gone after the block

    @contextmanager
    def _full_run_dir(self, event: Happened) -> Iterator[None]:
        """The disk of the run directory stays full."""
        try:
            fill_up(self._watch.run_dir)
            yield
        finally:
            (self._watch.run_dir / FILLER).unlink(missing_ok=True)

    @contextmanager
    def _two_signals(self, event: Happened) -> Iterator[None]:
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
            yield
        finally:
            withdraw(watch.orders, HOLD)

    @contextmanager
    def _severed_link(self, event: Happened) -> Iterator[None]:
        """The link between the trainer and all others is cut until the run has ended."""
        assert self._place is not None, "such a kind is drawn for several hosts only"
        with self._place.cut_link():
            yield

    # --- what the run must have done

    @property
    def _tracebacks(self) -> int:
        """The number of tracebacks on the terminal: a part that is ended may have one in its own log."""
        return self._watch.log.read_text(encoding="utf-8", errors="replace").count(TRACEBACK)

    def _problems(self, event: Happened, ending: Ending, code: int, messages: int, starts: int) -> list[str]:
        """Note how the run has ended; return what is not as the kind of the fault says.

        `messages`: how many it has told since the fault; `starts`: of the ranks, each of which tells one.
        """
        path = self._watch.run_dir / "exit.json"
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        status, reason = record.get("status", "nothing"), str(record.get("reason", ""))
        event.notes.append(f"the job has ended with code {code}, exit.json says {status}, {reason[:300]!r}")
        checks = {
            "the code is NOT 1": code == 1,
            "exit.json does NOT say failed": status == "failed",
            f"its reason does NOT have: {' or '.join(ending.reasons)}": any(each in reason for each in ending.reasons),
            f"{messages} messages were told, NOT {starts}": messages == starts,
        }
        return [text for text, right in checks.items() if not right]


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
    def awaited(self) -> Iterator[list[int]]:
        """Within the block, yield the codes with which the job ends in it; it is not started again."""
        self._codes = []
        self._free.clear()
        try:
            yield self._codes
        finally:
            self._free.set()
