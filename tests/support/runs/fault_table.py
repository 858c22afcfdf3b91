"""The soak's runs as tests: a run under named faults against the same run without any, and what that has measured."""

import argparse
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.chaos import (
    POINTS,
    REPLICAS,
    Fault,
    Kind,
    SoakOutcome,
    Tempo,
    accounting_rows,
    end_rows,
    loss_rows,
    missing,
    run_once,
    schedule,
)

FIRST_STEP = 3  # before the first fault: engines are warm
LAST_STEP = 12  # before all faults are due. Each waits until the run is over the one before
GROUPS = 24
SEED_VARIABLE = "MEGARL_FAULT_SEED"
TEMPO = Tempo(rpc_s=10.0, weight_sync_s=20.0)


@dataclass(frozen=True)
class FaultRuns:
    """Runs of the quickstart's task with the same seed, of which one is undisturbed.

    `kinds`: of the faults of all of them, which have the same config.
    """

    assets: Path
    directory: Path
    steps: int
    minutes: float
    kinds: Sequence[Kind]
    replicas: int = REPLICAS

    @property
    def options(self) -> argparse.Namespace:
        """Those of the soak."""
        return argparse.Namespace(
            assets=self.assets, steps=self.steps, seed=0, quick=False, minutes=self.minutes,
            replicas=self.replicas,
        )  # fmt: skip

    def run(self, name: str, faults: Sequence[Fault] = ()) -> SoakOutcome:
        """Make one run. The faults happen one after another; each waits until the run has got over the one before."""
        until = time.monotonic() + 60 * self.minutes
        return run_once(name, self.options, self.directory, until, faults, 0.0, self.kinds, TEMPO)

    def draw(self, kinds: Sequence[str]) -> list[Fault]:
        """Return faults of these kinds, in an order and at moments of a seed that is printed."""
        return schedule(_seed(), kinds, replicas=self.replicas, first=FIRST_STEP, last=LAST_STEP)


def moments() -> random.Random:
    """Return what tests draw the moments from at which they let a part of a run die, by a seed that is printed."""
    return random.Random(f"moments-{_seed()}")


def _seed() -> int:
    """Return the seed that is given, or a new one; it is printed as the variable that repeats it."""
    seed = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(10**6))
    print(f"{SEED_VARIABLE}={seed}")
    return seed


def problems_of(outcome: SoakOutcome, faults: Sequence[Fault]) -> list[str]:
    """Return what is wrong with a run by its files: its end, its counts, lost replicas, faults that it is not over."""
    rows = [*end_rows(outcome), *accounting_rows(outcome), *loss_rows(outcome)]
    wrong = [f"{row.name}: {row.ratio:g} {row.details}" for row in rows if not row.ok]
    over = [event.fault for event in outcome.happened if event.over]
    return wrong + [f"not survived: {name}" for name in missing(faults, over)]


def losses_of_accuracy(calm: SoakOutcome, disturbed: SoakOutcome) -> list[str]:
    """Return the kinds of held-out accuracy in which two runs differ by more than POINTS, or which one has not."""
    pairs = {mode: (calm.accuracy(mode), disturbed.accuracy(mode)) for mode in ("greedy", "sampled")}
    return [
        f"{mode}: {one:.1f}% and {other:.1f}%"
        for mode, (one, other) in pairs.items()
        if not abs(one - other) <= POINTS  # nan, too
    ]


def table_of(outcome: SoakOutcome) -> str:
    """Return what the faults of a run have cost, a line for each."""
    samples = GROUPS * 8
    lines = [
        f"{each.fault}: {each.recovered_s:.0f} s, {each.redone_steps * samples} samples redone, "
        f"{each.continued} responses continued; {'; '.join(each.notes)}"
        for each in outcome.happened
    ]
    accuracy = ", ".join(f"{mode} {outcome.accuracy(mode):.1f}%" for mode in ("greedy", "sampled"))
    return "\n".join([f"{outcome.name}: {accuracy}", *lines])
