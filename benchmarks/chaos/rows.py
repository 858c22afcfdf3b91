"""The rows of the soak's report: what each run has done, and what the disturbed one has lost against the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.kinds import Fault, Happened, lethal, missing
from benchmarks.lib.recount import AccountingReport
from benchmarks.lib.report import Ratio

POINTS = 3.0  # of accuracy, that the disturbed run may differ
REPLICAS, STALENESS = 2, 4


@dataclass
class SoakOutcome:
    """One run of the soak: its records, the independent count, and why it failed if it did."""

    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    report: AccountingReport | None = None
    happened: list[Happened] = field(default_factory=list)
    late_rewards: int = 0
    rolled_back: list[dict[str, Any]] = field(default_factory=list)  # records of steps that a resume has discarded
    left: list[str] = field(default_factory=list)
    failure: str = ""

    def total(self, metric: str, *, rolled_back: bool = False) -> float:
        """Return the sum of a metric over the steps, with `rolled_back` also over those that were made again."""
        records = [*self.records, *(self.rolled_back if rolled_back else [])]
        return sum(record.get(metric) or 0.0 for record in records)

    def accuracy(self, mode: str) -> float:
        """Return the final accuracy in points; nan if the run has none."""
        return 100.0 * float((self.summary.get("eval_after") or {}).get(mode, float("nan")))


def rows_of(
    calm: SoakOutcome, disturbed: SoakOutcome, faults: Sequence[Fault], minutes: float, limit: float
) -> list[Ratio]:
    """Return the rows of the report. A run that has failed misses every bound that needs it."""
    rows = [row for outcome in (calm, disturbed) for row in (*end_rows(outcome), *accounting_rows(outcome))]
    rows += fault_rows(disturbed, faults)
    for mode in ("greedy", "sampled"):
        difference = abs(disturbed.accuracy(mode) - calm.accuracy(mode))
        values = {each.name: f"{each.accuracy(mode):.1f}%" for each in (calm, disturbed)}
        rows.append(Ratio(f"final accuracy, {mode}: difference in points", difference, POINTS, details=values))
    return [*rows, Ratio("minutes / limit", minutes / limit, 1.0, details={"minutes": round(minutes, 1)})]


def end_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return the rows that say whether a run has come to its end, and whether it has left processes behind."""
    details = {"failure": outcome.failure[-1500:]} if outcome.failure else {"steps": len(outcome.records)}
    left = {str(number): each for number, each in enumerate(outcome.left, start=1)}
    return [
        Ratio(f"{outcome.name}: ended", float(not outcome.failure), 1.0, at_least=True, details=details),
        Ratio(f"{outcome.name}: processes left", float(len(outcome.left)), 0.0, details=left),
    ]


def accounting_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return one row for each check of the accounting, and one for the oldest token."""
    report = outcome.report
    if report is None:
        return [
            Ratio(f"{outcome.name}: accounting", float("nan"), 0.0, details={"failure": "there is no run to count"})
        ]
    rows = []
    for name, found in report.problems.items():
        details = {str(number): problem for number, problem in enumerate(found[:10], start=1)}
        rows.append(Ratio(f"{outcome.name}: {name}, problems", float(len(found)), 0.0, details=details))
    ends: Mapping[str, Any] = dict(report.ends)
    counted = {"groups admitted": report.admitted, **ends}
    rows.append(Ratio(f"{outcome.name}: oldest token / bound", report.oldest / STALENESS, 1.0, details=counted))
    return rows


def fault_rows(outcome: SoakOutcome, faults: Sequence[Fault]) -> list[Ratio]:
    """Return the rows that say whether the faults happened, and whether the run has noticed them."""
    over = sum(each.over for each in outcome.happened)
    details = {str(number): str(each) for number, each in enumerate(outcome.happened, start=1)}
    if absent := missing(faults, [each.fault for each in outcome.happened if each.over]):
        details["not happened, or not over"] = ", ".join(absent)
    return [
        Ratio("faults survived / planned", ratio(over, len(faults)), 1.0, at_least=True, details=details),
        *loss_rows(outcome),
        reward_row(outcome),
        skipped_row(outcome),
    ]


def loss_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return the rows that say what the loss of replicas has cost.

    Those that were restarted beyond what the faults explain (`explained`) were restarted without a loss.
    """
    lost, restarted = lethal(outcome.happened), outcome.total("sync/restarted_replicas", rolled_back=True)
    unexplained = max(0.0, restarted - sum(map(explained, outcome.happened)))
    if not lost:
        return [Ratio("replicas restarted without a loss", unexplained, 0.0)]
    counts = {"lost": len(lost), "restarted": restarted}
    continued = [each.continued for each in lost if each.busy]
    responses = {"by each loss of a busy replica": continued, "in all": outcome.total("rollout/continued")}
    return [
        Ratio("replicas restarted / lost", ratio(restarted, len(lost)), 1.0, at_least=True, details=counts),
        Ratio("replicas restarted without a loss", unexplained, 0.0),
        Ratio(
            "responses continued elsewhere, least of a busy replica that was lost",
            min(continued, default=float("nan")), 1.0, at_least=True, details=responses,
        ),
    ]  # fmt: skip


def explained(event: Happened) -> int:
    """Return how many of the replicas that were restarted after a fault it explains.

    A fault of one replica explains that one. In a weight sync it may be in doubt which replica has made it fail, so all
    are replaced; and ranks or a controller that a fault takes away may leave any number of them unusable.
    """
    kind = event.fault.kind
    any_number = kind.ends or (kind.loses and kind.moment == "in-sync")
    return min(REPLICAS if any_number else int(kind.loses), event.restarted)


def reward_row(outcome: SoakOutcome) -> Ratio:
    """Return the row that says whether the run has counted each late reward, and no other one.

    A reward worker that was stopped, or was killed in a late answer, makes a difference of one. What was discarded with
    the ranks, the controller, the queue or an agent worker is counted nowhere, so after such a fault only the time-outs
    too many count.
    """
    late, counted = outcome.late_rewards, outcome.total("reward/errors")
    kinds = [each.fault.kind for each in outcome.happened]
    hit = sum(kind.target == "reward" and not kind.order for kind in kinds)
    discarded = any(kind.ends or (kind.target == "agent-worker" and not kind.order) for kind in kinds)
    too_few = 0.0 if discarded else late - counted
    difference = max(counted - late, too_few, float(hit)) - hit if late else float("nan")
    details = {"late": late, "counted by the run (reward/errors)": counted, "reward workers killed or stopped": hit}
    return Ratio("reward time-outs counted: difference to the late rewards", difference, 0.0, details=details)


def skipped_row(outcome: SoakOutcome) -> Ratio:
    """Return the row that says how many more steps were skipped than faults explain. A resume may have undone some."""
    skipped = float("nan") if outcome.report is None else float(outcome.report.skipped)
    spoiled = sum(each.spoiled for each in outcome.happened)
    details = {"skipped": skipped, "spoiled by faults": spoiled}
    return Ratio("steps skipped without a number that is not finite", max(0.0, skipped - spoiled), 0.0, details=details)


def ratio(value: float, of: float) -> float:
    """Return value / of; nan, which misses every bound, if there is nothing to compare with."""
    return value / of if of else float("nan")
