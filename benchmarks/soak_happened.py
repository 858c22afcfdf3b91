"""A fault that has happened to a run, and what the run has done about it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_kinds import Fault  # noqa: E402


@dataclass
class Happened:
    """A fault that was injected: when, on which process, and what the run did. `over`: it did what it should.

    `busy`: the engine had requests. `continued`, `restarted`: the responses that other engines have finished, and the
    replicas that were restarted, until the next fault. `recovered_s`: from the fault until the run had gone on with
    what was lost. `new_pid`, `new_since`, `start_s`: the process of the replica in place of a lost one, when it began,
    and how long it took to start. `beside`: a publication has noticed the loss and has gone on without the replica, so
    that the new one started beside training and joined a later publication. `redone_steps`: steps that a resume has
    gone back. `spoiled`: numbers that it has made not finite. `told_before`: how often the run had told what it tells
    of such a fault; `left_out_before`: how often publications had left a replica out.
    """

    fault: Fault
    pid: int
    step: int
    at_s: float
    over: bool = False
    busy: bool = False
    continued: int = 0
    restarted: int = 0
    recovered_s: float = 0.0
    new_pid: int = 0
    new_since: float = 0.0
    start_s: float = 0.0
    beside: bool = False
    longest_gap_s: float = 0.0
    redone_steps: int = 0
    spoiled: int = 0
    told_before: int = 0
    left_out_before: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "" if self.over else "NOT OVER: "
        return f"step {self.step}, {self.fault} (pid {self.pid}): {state}{'; '.join(self.notes)}"


def lethal(happened: Sequence[Happened]) -> list[Happened]:
    """Return the faults that cost a replica."""
    return [each for each in happened if each.fault.kind.loses]


def longest_gap(records: Sequence[Mapping[str, Any]], since: int, at: float) -> float:
    """Return the longest time in seconds without the end of a step, from a fault on that came after step `since`.

    `at`: when it came, in seconds since the epoch.
    """
    ends = [at, *(record["wall_time"] for record in records[since:])]
    return max((after - before for before, after in itertools.pairwise(ends)), default=0.0)
