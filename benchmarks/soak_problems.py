"""The report of the soak's accounting: its counts, and the problems that it has found in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

ENDS = ("trained", "filtered", "dropped_stale", "failed")
CHECKS = {
    "counts": "admitted = trained + filtered + stale + failed at every step, by the batches, the schedule and metrics",
    "groups": "every admitted group ends once; none is lost, none is in two batches",
    "staleness": "no group is trained whose oldest token is older than the bound",
    "epochs": "no prompt is twice in an epoch",
    "versions": "every token has the version of weights that were published before, on both sides the same",
    "engines": "every engine that was started was there at the start, was added, or is a restart that the metrics tell",
    "rewards": "no sample has a reward that its function does not give, and equal answers have equal ones",
    "finite": "a step with a log-prob that is not finite was skipped; of a skipped step nothing was trained",
}


class UnreadableRun(ValueError):  # noqa: N818
    """The files of a run are missing, damaged, or of a kind that this script cannot judge; the message says which."""


@dataclass
class AccountingReport:
    """The numbers that were counted, and what is wrong with the run, by the name of the check."""

    ends: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    admitted: int = 0
    oldest: int = 0
    prompts_twice: int = 0
    engine_starts: int = 0
    engine_restarts: int = 0
    skipped: int = 0
    problems: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in CHECKS})

    @property
    def ok(self) -> bool:
        return not any(self.problems.values())

    def expect(self, check: str, what: str, found: object, wanted: object) -> None:
        """Note a problem unless two counts are equal."""
        if found != wanted:
            self.problems[check].append(f"{what}: {found}, but {wanted}")

    def lines(self) -> Iterator[str]:
        """Yield the report as text."""
        ends = ", ".join(f"{self.ends[end]} {end}" for end in ENDS)
        yield f"{self.steps} steps, {self.admitted} groups admitted: {ends}; oldest token {self.oldest} updates"
        yield f"{self.engine_starts} engine starts, {self.engine_restarts} restarts; {self.skipped} steps skipped"
        for name, found in self.problems.items():
            yield f"{name}: {'ok' if not found else f'{len(found)} problems'}"
            yield from (f"    {each}" for each in found[:20])
