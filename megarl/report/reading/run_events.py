"""The events of a run for its report: the slowest trajectories, and faults with their outcomes."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.telemetry.trace.files import RunEvent, read_events

CAUSES = ("queue", "prefill", "decode", "tool", "reward", "other")
SLOWEST = 20  # trajectories shown
MOST_FAULTS = 200  # shown, the newest
# Faults that metrics count: (series, aggregation, what happened, outcome).
COUNTED_FAULTS = (
    ("sync/restarted_replicas", "sum", "engines failed a weight sync", "replaced by new ones at the next publication"),
    ("rollout/continued", "sum", "responses lost their engine", "other engines continued from the reported tokens"),
    ("rollout/replicas_lost", "max", "engines lost at the same time, at most", "replaced by the next publication"),
    ("rollout/rebuilds", "max", "losses of controller or queue", "started again; the trainer continued"),
    ("rollout/workers_lost", "sum", "agent workers died or did not answer", "replaced by new ones"),
    ("rollout/groups_redone", "sum", "groups lost their agent worker", "another worker continued them"),
    ("rollout/cut", "sum", "responses reached their group's deadline", "cut there, and truncated"),
    ("groups/failed", "sum", "groups had fewer than two usable samples", "counted, and not trained"),
    ("groups/dropped_stale", "sum", "groups were too old when their step came", "counted, and not trained"),
    ("batch/failed_samples", "sum", "samples failed", "counted, and not trained"),
    ("reward/errors", "sum", "rewards failed", "by reward.on_error: dropped, or a fixed reward"),
    ("reward/redone", "sum", "rewards lost their process", "scored again"),
    ("total/groups_rolled_back", "max", "groups were discarded by a resume", "drawn again under the same ids"),
    ("rollout/groups_kept", "sum", "groups from before a resume were still valid", "reused or continued"),
    ("total/failed_writes", "max", "writes were refused by a disk or a service", "lines wait, and are written later"),
)  # fmt: skip


@dataclass(frozen=True)
class SlowTrajectory:
    """One of the slowest trajectories of a run. `parts`: seconds by cause, in the order of `CAUSES`."""

    step: int
    group: int
    sample: int
    replica: int | None
    seconds: float
    parts: tuple[float, ...]
    tokens: int
    turns: int

    @property
    def cause(self) -> str:
        """The cause of the largest part."""
        return max(zip(self.parts, CAUSES, strict=True))[1]


@dataclass(frozen=True)
class RunFault:
    """Something that was lost or failed, and its outcome, which is empty until there is one."""

    at: float  # Unix seconds
    step: int | None
    process: str
    kind: str
    text: str
    outcome: str = ""
    after_s: float | None = None  # from the fault to its outcome
    rule: str = ""  # of an alarm

    @property
    def is_alarm(self) -> bool:
        """True for an alarm of the monitor."""
        return self.kind == "alarm"


@dataclass(frozen=True)
class RunEvents:
    """The events of a run; `recorded` is False if the run records none."""

    slow: list[SlowTrajectory]
    faults: list[RunFault]
    recorded: bool


def read_run_events(run_dir: Path) -> RunEvents:
    """Read the events of slow trajectories, faults and recoveries, without work that a resume discarded."""
    slow: list[tuple[float, int, SlowTrajectory]] = []
    found: list[RunEvent] = []
    recorded = False
    for number, event in enumerate(read_events(run_dir, {"slow_trajectory", "fault", "recovery"})):
        recorded = True
        if event.name != "slow_trajectory":
            if not (event.rolled_back and event.args.get("kind") == "alarm"):  # its step was repeated
                found.append(event)
        elif not event.rolled_back:
            entry = (event.seconds, -number, slow_trajectory(event))
            (heapq.heappush if len(slow) < SLOWEST else heapq.heappushpop)(slow, entry)
    slowest = [trajectory for *_, trajectory in sorted(slow, reverse=True)]
    return RunEvents(slowest, pair(found)[-MOST_FAULTS:], recorded or (run_dir / "events").is_dir())


def slow_trajectory(event: RunEvent) -> SlowTrajectory:
    """Return the content of a `slow_trajectory` event."""
    return SlowTrajectory(
        event.step or 0,
        -1 if event.group is None else event.group,
        -1 if event.sample is None else event.sample,
        event.replica,
        event.seconds,
        tuple(float(event.args.get(f"{cause}_s", 0.0)) for cause in CAUSES),
        int(event.args.get("tokens", 0)),
        int(event.args.get("turns", 1)),
    )


def pair(events: Iterable[RunEvent]) -> list[RunFault]:
    """Return the faults by time, each with its outcome.

    A recovery ends one fault: the oldest open one of its kind, replica and rule.
    """
    faults: list[RunFault] = []
    open_: dict[tuple[str, int | None, str], list[int]] = {}
    for event in sorted(events, key=lambda event: (event.begin, event.name != "fault")):
        key = (str(event.args.get("kind", "")), event.replica, str(event.args.get("rule", "")))
        text = str(event.args.get("text", ""))
        if event.name == "fault":
            open_.setdefault(key, []).append(len(faults))
            faults.append(RunFault(event.begin, event.step, event.process, key[0], text, rule=key[2]))
        elif waiting := open_.get(key):
            number = waiting.pop(0)
            after_s = event.begin - faults[number].at
            faults[number] = replace(faults[number], outcome=text or "the run continued", after_s=after_s)
    return faults
