"""The two sides of the accounting: how each group ends by the rules, and what a schedule has made of it.

The trainer's side are the rows of batches/*.parquet, the rollout side the events of schedule.jsonl. What does not
fit is noted in an `AccountingReport`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

ENDS = ("trained", "filtered", "dropped_stale", "failed")
CHECKS = {
    "counts": "admitted = trained + filtered + stale + failed at every step, by the batches, the schedule and metrics",
    "groups": "every admitted group ends once; none is lost, none is in two batches",
    "staleness": "no group is trained whose oldest token is older than the bound",
    "epochs": "no prompt is twice in an epoch",
    "versions": "every token has the version of weights that were published before, on both sides the same",
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
        yield f"{self.skipped} steps skipped"
        for name, found in self.problems.items():
            yield f"{name}: {'ok' if not found else f'{len(found)} problems'}"
            yield from (f"    {each}" for each in found[:20])


EQUAL = 1e-8  # rewards that differ by no more are equal
# The rewards that a reward function gives to a sample that it has scored.
REWARDS = {"math": {0.0, 1.0}, "benchmarks.chaos.orders:late_math": {0.0, 1.0}}
_PART = re.compile(r"step_(\d+)\.(\d+)-of-(\d+)\.parquet")


@dataclass(frozen=True)
class Rules:
    """The settings of a run that decide how its groups end. `bound`: the most updates that a token may be old."""

    steps: int
    groups: int
    samples: int
    updates: int  # per step
    bound: int
    truncated: str
    filters: bool
    prompts: int
    reward: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], bound: int, prompts: int) -> Rules:
        """Read the settings. Raises UnreadableRun for those whose rules are not written down here."""
        algorithm, admission = config["algorithm"], config["admission"]
        if config["data"].get("sets") or algorithm["overlong"]["buffer_tokens"]:
            raise UnreadableRun("data.sets and algorithm.overlong are not supported by this check")
        if admission.get("max_uses", 1) > 1:
            raise UnreadableRun("admission.max_uses > 1 is not supported by this check")
        if admission["max_staleness"] not in (None, bound):
            raise UnreadableRun(f"admission.max_staleness is {admission['max_staleness']}, the schedule's is {bound}")
        return cls(
            steps=config["run"]["steps"],
            groups=config["batch"]["groups"],
            samples=config["batch"]["samples_per_group"],
            updates=config["trainer"]["mini_batches"],
            bound=bound,
            truncated=config["sampling"]["truncated"],
            filters=algorithm["filter_zero_variance"] is not False,
            prompts=prompts,
            reward=config["reward"]["function"],
        )


@dataclass(frozen=True)
class CountedGroup:
    """The rows of one group in a step's batch; `lag`: updates between its oldest token and the step's last update."""

    number: int
    end: str
    lag: int | None
    prompt: tuple[int, ...]
    versions: frozenset[int]
    trained_samples: int = 0
    loss_tokens: int = 0
    trained_tokens: int = 0


def read_batches(directory: Path, before: int | None = None) -> dict[int, tuple[int, list[dict[str, Any]]]]:
    """Return (version of the weights, rows) by step. Raises UnreadableRun if a part of a step is missing.

    `before`: the first step that is left out; None: all are read.
    """
    import pyarrow.parquet as pq

    parts: dict[int, dict[int, Path]] = defaultdict(dict)
    totals: dict[int, set[int]] = defaultdict(set)
    for path in sorted(directory.glob("step_*.parquet")):
        if match := _PART.fullmatch(path.name):
            step, part, total = map(int, match.groups())
            if before is not None and step >= before:
                continue
            parts[step][part] = path
            totals[step].add(total)
    batches = {}
    for step, found in parts.items():
        if totals[step] != {len(found)}:
            raise UnreadableRun(f"{directory}: step {step} has parts {sorted(found)} of {sorted(totals[step])}")
        tables = [pq.read_table(path) for path in found.values()]
        versions = {int(table.schema.metadata[b"megarl.version"]) for table in tables}
        if len(versions) != 1:
            raise UnreadableRun(f"{directory}: step {step} has parts of versions {sorted(versions)}")
        batches[step] = (versions.pop(), [row for table in tables for row in table.to_pylist()])
    return batches


def find_skipped(run_dir: Path, batches: Mapping[int, tuple[int, list[dict[str, Any]]]]) -> set[int]:
    """Return the steps that were skipped: those whose batch was kept as a failed one, after it had been recorded.

    A step that a resume has made again, with other groups or with the same, was recorded after the failed one was kept.
    """
    skipped = set()
    for step in batches:
        kept, made = (_written(run_dir / name, step) for name in ("failed_batch", "batches"))
        if kept and max(kept) >= max(made):
            skipped.add(step)
    return skipped


def _written(directory: Path, step: int) -> list[int]:
    """Return when the parts of a step were written, in nanoseconds; [] if there are none."""
    return [path.stat().st_mtime_ns for path in directory.glob(f"step_{step:06d}.*.parquet")]


def skip(groups: Sequence[CountedGroup]) -> list[CountedGroup]:
    """Return the groups of a step that was skipped: those that would have been trained have failed."""
    return [
        replace(each, end="failed", trained_samples=0, loss_tokens=0, trained_tokens=0)
        if each.end == "trained"
        else each
        for each in groups
    ]


def is_finite(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all log-probs of the rows are finite, those of failed samples too."""
    return all(math.isfinite(value) for row in rows for value in row["rollout_logprobs"])


def check_rewards(
    step: int,
    rows: Sequence[Mapping[str, Any]],
    rules: Rules,
    seen: dict[tuple[object, ...], float],
    report: AccountingReport,
) -> None:
    """Note rewards that the run's function does not give, and answers that are equal and have different ones.

    Of a function that is not in REWARDS nothing is known. `seen`: the rewards of the answers of earlier steps.
    """
    if (known := REWARDS.get(rules.reward)) is None:
        return
    for row in rows:
        if row["status"] != "ok":
            continue
        where = f"step {step}, group {row['group_id']}, sample {row['sample_index']}"
        if row["reward"] not in known:
            report.problems["rewards"].append(f"{where} has the reward {row['reward']}, not one of {sorted(known)}")
        answer = (*row["prompt_ids"], None, *row["response_ids"])
        if (other := seen.setdefault(answer, row["reward"])) != row["reward"]:
            report.problems["rewards"].append(f"{where} has the reward {row['reward']}, an equal answer {other}")


def counts_as(span: Mapping[str, int]) -> int:
    """Return the version that the tokens of a span count as: weights with updates that were lost count as older."""
    return span["version"] - 2 * (span.get("lost") or 0)


def judge(number: int, rows: Sequence[Mapping[str, Any]], version: int, rules: Rules) -> CountedGroup:
    """Return how a group ends by the rules, from its rows alone; `version`: that of the weights before the step.

    Each row is a sample (`recount` notes any others). A group with fewer than two to train on has failed, however old.
    """
    alive = [row for row in rows if row["status"] == "ok"]
    tokens = [counts_as(span) for row in alive for span in row["versions"]]
    last_update = version + rules.updates - 1
    lag = last_update - min(tokens) if tokens else None
    versions = frozenset(counts_as(span) for row in rows for span in row["versions"])
    group = CountedGroup(number, "failed", lag, tuple(rows[0]["prompt_ids"]), versions)
    if len(alive) < 2:
        return group
    if lag is not None and lag > rules.bound:
        return replace(group, end="dropped_stale")
    cut = [row["finish_reason"] == "length" for row in alive]
    zero = rules.truncated == "zero_reward"
    rewards = [0.0 if zero and was_cut else row["reward"] for row, was_cut in zip(alive, cut, strict=True)]
    if rules.filters and max(rewards) - min(rewards) <= EQUAL:
        return replace(group, end="filtered")
    masked = rules.truncated == "mask"
    in_loss = [row for row, was_cut in zip(alive, cut, strict=True) if not (masked and was_cut)]
    return replace(
        group,
        end="trained",
        trained_samples=len(in_loss),
        loss_tokens=sum(sum(row["response_mask"]) for row in in_loss),
        trained_tokens=sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in alive),
    )


def recount(
    step: int, version: int, rows: Sequence[dict[str, Any]], rules: Rules, report: AccountingReport
) -> list[CountedGroup]:
    """Return the groups of a step's batch with their ends; note groups that are not whole, and tokens without version.

    Each group must have each of its samples once, of one prompt.
    """
    ordered = sorted(rows, key=lambda row: (row["group_id"], row["sample_index"]))
    groups = []
    for number, found in groupby(ordered, key=lambda row: int(row["group_id"])):
        own = list(found)
        where = f"step {step}, group {number}"
        indices = [row["sample_index"] for row in own]
        report.expect("groups", f"{where} has samples", indices, list(range(rules.samples)))
        prompts = {tuple(row["prompt_ids"]) for row in own if row["status"] == "ok"}
        if len(prompts) > 1:
            report.problems["groups"].append(f"{where} has {len(prompts)} prompts")
        for row in own:
            _check_spans(f"{where}, sample {row['sample_index']}", row, version, report)
        groups.append(judge(number, own, version, rules))
    return groups


def _check_spans(where: str, row: Mapping[str, Any], version: int, report: AccountingReport) -> None:
    if row["status"] != "ok":
        return
    end = 0
    for span in row["versions"]:
        report.expect("versions", f"{where}: a span begins at token", span["start"], end)
        end = span["end"]
        if not span.get("lost") and span["version"] > version:
            report.problems["versions"].append(f"{where} has tokens of version {span['version']}, after {version}")
    report.expect("versions", f"{where}: tokens with a version", end, len(row["response_ids"]))


class RolloutSide:
    """Follows the groups of a schedule from event to event; each must be in exactly one place."""

    def __init__(self, report: AccountingReport) -> None:
        self._report = report
        self.admitted: set[int] = set()
        self.in_flight: set[int] = set()
        self.ready: dict[int, bool] = {}
        self.replaced: set[int] = set()
        self.taken: dict[int, dict[str, list[int]]] = {}
        self.commits: dict[int, dict[str, int]] = {}
        self.versions: dict[int, frozenset[int]] = {}  # of the tokens of each group that has finished
        self.published: set[int] = set()
        self.kept: set[int] = set()
        self.starts = self.begins = 0
        self._latest = 0  # groups of the latest event that admitted some
        self.pace: dict[str, int] = {}

    def follow(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Follow all events, and note every one that does not fit what was before it."""
        for number, event in enumerate(events, start=1):
            handler = getattr(self, f"_{event['event']}", None)
            if handler is None:
                raise UnreadableRun(f"line {number} of the schedule is an unknown event: {event['event']!r}")
            handler(event)

    def groups_of(self, step: int) -> list[int]:
        """Return the ids of all groups that a step has taken, replaced ones included."""
        return sorted(group for groups in self.taken.get(step, {}).values() for group in groups)

    @property
    def settled(self) -> list[int]:
        """The ids of the groups of all committed steps, with repetitions if there are any."""
        return [group for step in self.commits for group in self.groups_of(step)]

    def _wrong(self, text: str) -> None:
        self._report.problems["groups"].append(f"schedule: {text}")

    def _begin(self, event: Mapping[str, Any]) -> None:
        """Go back to the history that an attempt of the run resumes: the steps up to its checkpoint."""
        state, self.pace = event["state"], event["pace"]
        self.begins += 1
        self.taken = {step: each for step, each in self.taken.items() if step < state["steps"]}
        self.commits = {step: each for step, each in self.commits.items() if step < state["steps"]}
        self.admitted = set(range(state["next_group"])) - set(state["unsettled"])
        if self.admitted != set(self.settled):
            self._wrong(f"the history of {state['steps']} steps settles other groups than its steps have")
        self.in_flight, self.ready, self.replaced = set(), {}, set()
        self.published, self.kept = set(), set()
        started = max(event["attempts"], state["attempts"])
        # The controller counts groups on the disk before it starts them, and may have ended in between.
        if started not in (self.starts, self.starts - self._latest) and self.begins > 1:
            self._wrong(f"{self.starts} groups were started, and the next attempt knows of {started}")
        self.starts, self._latest = started, 0

    def _announce(self, event: Mapping[str, Any]) -> None:
        self.published.add(event["version"])

    _set_version = _announce

    def _admit(self, event: Mapping[str, Any]) -> None:
        for group in event["groups"]:
            if group in self.admitted:
                self._wrong(f"group {group} was admitted twice")
            self.admitted.add(group)
            self.in_flight.add(group)
        self.starts += len(event["groups"])
        self._latest = len(event["groups"])

    def _keep(self, event: Mapping[str, Any]) -> None:
        self.admitted |= set(event["started"])
        self.in_flight |= set(event["started"])
        self.kept |= set(event["started"])

    def _hold(self, event: Mapping[str, Any]) -> None:
        """Go on with steps that were taken before `begin`: a new controller got them from the trainer."""
        for each in event["taken"]:
            self.taken[each["step"]] = {name: list(each[name]) for name in ("ok", "failed", "replaced")}
            self.admitted |= set(self.groups_of(each["step"]))

    def _land(self, event: Mapping[str, Any]) -> int:
        """Take a group out of flight and note the versions of its tokens."""
        group = int(event["group"])
        if group not in self.in_flight:
            self._wrong(f"group {group} has finished, and was not in flight")
        self.in_flight.discard(group)
        self.versions[group] = frozenset(event["versions"])
        unknown = self.versions[group] - self.published
        if unknown and group not in self.kept:
            text = f"group {group} has finished with tokens of versions {sorted(unknown)}, never published"
            self._report.problems["versions"].append(text)
        return group

    def _finish(self, event: Mapping[str, Any]) -> None:
        self.ready[self._land(event)] = event["ok"]

    def _replace(self, event: Mapping[str, Any]) -> None:
        self.replaced.add(self._land(event))

    def _batch(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        for name, usable in (("ok", True), ("failed", False)):
            for group in event[name]:
                if self.ready.pop(group, None) is not usable:
                    self._wrong(f"step {step} has taken group {group} as {name}, which it was not")
        if set(event["replaced"]) != self.replaced:
            self._wrong(f"step {step} settles {event['replaced']} as replaced, not {sorted(self.replaced)}")
        self.replaced = set()
        self.taken[step] = {name: list(event[name]) for name in ("ok", "failed", "replaced")}

    def _commit(self, event: Mapping[str, Any]) -> None:
        self.commits[event["step"]] = {end: event[end] for end in ENDS}

    def end_at(self, steps: int) -> None:
        """Forget the commits from step `steps` on, which a run that was stopped has not reported any more."""
        self.commits = {step: each for step, each in self.commits.items() if step < steps}

    @property
    def under_way(self) -> set[int]:
        """The ids of the groups that have a place, and no end."""
        held = {group for step in self.taken.keys() - self.commits.keys() for group in self.groups_of(step)}
        return self.in_flight | self.ready.keys() | self.replaced | held

    def check_end(self, stopped: bool) -> None:
        """Note the groups that were started and have no end; in a run that was `stopped`, those without a place."""
        again = [group for group, times in Counter(self.settled).items() if times > 1]
        if again:
            self._wrong(f"groups {again[:10]} are in two steps")
        if lost := sorted(self.admitted - set(self.settled) - (self.under_way if stopped else set())):
            self._wrong(f"{len(lost)} groups were admitted and have no end: {lost[:10]}")
