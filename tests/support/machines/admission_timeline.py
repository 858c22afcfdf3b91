"""The timeline of a run around an `Admission`: engines with some places, and a trainer that needs a second per step."""

import heapq
import math
import random
from dataclasses import dataclass, field

from megarl.rollout.admission.admission import Admission


@dataclass
class Timeline:
    """`seconds`: how long the run took; `reused`: the further uses of groups."""

    admission: Admission
    places: int
    duration: float
    seconds: float = 0.0
    reused: int = 0
    waiting: list[int] = field(default_factory=list)
    running: list[tuple[float, int, int]] = field(default_factory=list)  # end, group, version
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def start(self) -> None:
        """Start the groups that admission and engines have room for."""
        self.waiting += self.admission.admit()
        while self.waiting and len(self.running) < self.places:
            end = self.seconds + self.duration * self.draw.uniform(0.5, 1.5)
            heapq.heappush(self.running, (end, self.waiting.pop(0), self.admission.version))

    def until(self, end: float) -> bool:
        """Let the next group finish; False if none does before `end`."""
        if not self.running or self.running[0][0] > end:
            self.seconds = end
            return False
        self.seconds, group, version = heapq.heappop(self.running)
        self.admission.finish(group, True, [version])
        self.start()
        return True

    def step(self, number: int) -> None:
        """Wait for the groups of a step, and train it; the next one is asked for meanwhile."""
        while (taken := self.admission.batch(number)) is None:
            assert self.until(math.inf), "nothing is in flight"
        trained = self.seconds + 1.0
        while self.until(trained):
            if number + 1 != self.admission.steps:
                self.admission.batch(number + 1)
        reused = len(sorted(self.admission.taken(number).reused))
        self.admission.commit(
            number, trained=len(taken[0]), filtered=0, dropped_stale=0, failed=0, reused=reused, trained_groups=taken[0]
        )
        self.reused += reused
        self.admission.set_version(number + 1)
        self.start()


def run_timeline(admission: Admission, places: int, duration: float) -> Timeline:
    """Run to the last step of `admission`, which publishes after every step. `duration`: mean seconds per group."""
    assert admission.steps is not None
    run = Timeline(admission, places, duration)
    admission.set_version(0)
    run.start()
    for number in range(admission.steps):
        run.step(number)
    return run
