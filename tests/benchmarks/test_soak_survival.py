"""The moment from which the soak counts a run as over the loss of a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.soak_happened import Happened
from benchmarks.soak_kinds import KINDS, Fault
from benchmarks.soak_survival import Survival


class ScriptedRun:
    """A run of which each look finds the next moment: its steps so far, the processes of the part, and its replicas."""

    RECOVER_S, replicas = 1.0, 2
    restarts, seconds = 0, 9.0

    def __init__(self, step: int, moments: list[tuple[int, int, int]]) -> None:
        self.step, self.present, self._alive = step, 0, 2
        self._moments: Iterator[tuple[int, int, int]] = iter(moments)

    @property
    def records(self) -> list[dict[str, float]]:
        """Return the newest step."""
        return [{"rollout/replicas_alive": self._alive}]

    def find_agent(self) -> None:
        """Return the same all the time."""

    def find_processes(self, target: str) -> list[int]:
        return [1] * self.present

    def recovers(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            try:
                self.step, self.present, self._alive = next(self._moments)
            except StopIteration:
                return False
        return True


@pytest.mark.parametrize(
    ("kind", "moments", "over", "redone"),
    [
        ("hang-reward", [(6, 0, 2), (7, 0, 2), (7, 1, 2), (8, 1, 2), (9, 1, 2)], True, 0),
        ("hang-reward", [(6, 0, 2), (7, 0, 2), (8, 0, 2), (8, 1, 2), (9, 1, 2)], False, 0),
        ("hang-reward", [(6, 0, 2), (7, 0, 2), (8, 0, 2)], False, 0),
        ("kill-rank", [(5, 0, 2), (3, 0, 2), (3, 1, 2), (4, 1, 2), (5, 1, 2)], True, 2),
        ("kill-rank", [(5, 1, 2), (3, 1, 2), (4, 1, 2)], False, 2),
        ("limit-job", [(4, 0, 2), (4, 1, 2), (5, 1, 2), (6, 1, 2)], False, 1),
        ("kill-queue", [(6, 1, 2), (7, 1, 2), (8, 1, 1), (9, 1, 1), (10, 1, 2)], True, 0),
        ("kill-controller", [(6, 1, 2), (7, 1, 2), (8, 1, 2)], False, 0),
        ("hang-controller", [(6, 1, 2), (7, 1, 2), (8, 1, 1), (9, 1, 1), (10, 1, 1)], False, 0),
    ],
    ids=[
        "batches were left",
        "no step needed it",
        "it is gone",
        "resumed",
        "one step",
        "no step may be made again",
        "an engine was lost with it",
        "too few steps",
        "an engine stays lost",
    ],
)
def test_two_steps_count_from_when_the_part_is_there_again(
    kind: str, moments: list[tuple[int, int, int]], over: bool, redone: int
) -> None:
    run: Any = ScriptedRun(5, moments)
    event = Happened(Fault(KINDS[kind], 0, 5, 0.0, 0.0), 1, 5, 0.0)
    hit: Any = [SimpleNamespace(is_running=lambda: False, status=lambda: "", pid=1)]
    assert Survival(run).judge(event, hit, KINDS[kind].target) == over, event.notes
    if over:
        assert event.redone_steps == redone and run.step == moments[-1][0], "the run was over it earlier"
