#!/usr/bin/env python3
"""Counts again, from a run's files alone, how every prompt group ended, and compares both sides of the run.

    python benchmarks/soak_accounting.py RUN_DIR

It imports nothing of megarl: the rules are written down here a second time. The trainer's side is recounted from the
rows of batches/*.parquet, the rollout side from the group ids in schedule.jsonl; both are compared with each other and
with what the run says of itself (metrics.jsonl, attempts.json). A run that is checked needs `telemetry.dump_batches`,
one data set, and a training file without equal prompts. Its trainer may have been killed and resumed.

The files have no list of the groups that were trained. The trainer's numbers of trained samples and tokens take its
place: they must be those of the groups that are trained by the rules.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    "engines": "every engine that was started was there at the start or is a restart that the metrics tell",
}
EQUAL = 1e-8  # rewards that differ by no more are equal
_PART = re.compile(r"step_(\d+)\.(\d+)-of-(\d+)\.parquet")
_ENGINE = re.compile(r"\(EngineCore pid=(\d+)\)")


class UnreadableRun(ValueError):  # noqa: N818
    """The files of a run are missing, damaged, or of a kind that this script cannot judge; the message says which."""


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
    replicas: int
    prompts: int

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
            filters=algorithm["filter_zero_variance"],
            replicas=config["rollout"]["replicas"],
            prompts=prompts,
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
        yield f"{self.engine_starts} engine starts, {self.engine_restarts} of them restarts"
        for name, found in self.problems.items():
            yield f"{name}: {'ok' if not found else f'{len(found)} problems'}"
            yield from (f"    {each}" for each in found[:20])


# --- the trainer's side: what it was given, by the rows of the recorded batches


def read_batches(directory: Path) -> dict[int, tuple[int, list[dict[str, Any]]]]:
    """Return (version of the weights, rows) by step. Raises UnreadableRun if a part of a step is missing."""
    import pyarrow.parquet as pq

    parts: dict[int, dict[int, Path]] = defaultdict(dict)
    totals: dict[int, set[int]] = defaultdict(set)
    for path in sorted(directory.glob("step_*.parquet")):
        if match := _PART.fullmatch(path.name):
            step, part, total = map(int, match.groups())
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


def counts_as(span: Mapping[str, int]) -> int:
    """Return the version that the tokens of a span count as: weights with updates that were lost count as older."""
    return span["version"] - 2 * (span.get("lost") or 0)


def judge(number: int, rows: Sequence[Mapping[str, Any]], version: int, rules: Rules) -> CountedGroup:
    """Return how a group ends by the rules, from its rows alone; `version`: that of the weights before the step."""
    alive = [row for row in rows if row["status"] == "ok"]
    tokens = [counts_as(span) for row in alive for span in row["versions"]]
    last_update = version + rules.updates - 1
    lag = last_update - min(tokens) if tokens else None
    prompt = tuple(rows[0]["prompt_ids"])
    versions = frozenset(counts_as(span) for row in rows for span in row["versions"])
    if lag is not None and lag > rules.bound:
        return CountedGroup(number, "dropped_stale", lag, prompt, versions)
    if len(alive) < 2:
        return CountedGroup(number, "failed", lag, prompt, versions)
    cut = [row["finish_reason"] == "length" for row in alive]
    zero = rules.truncated == "zero_reward"
    rewards = [0.0 if zero and was_cut else row["reward"] for row, was_cut in zip(alive, cut, strict=True)]
    if rules.filters and max(rewards) - min(rewards) <= EQUAL:
        return CountedGroup(number, "filtered", lag, prompt, versions)
    masked = rules.truncated == "mask"
    in_loss = [row for row, was_cut in zip(alive, cut, strict=True) if not (masked and was_cut)]
    return CountedGroup(
        number,
        "trained",
        lag,
        prompt,
        versions,
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


# --- the rollout side: which groups it started, and what became of each, by their ids


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
        self.starts = 0
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
        self.taken = {step: each for step, each in self.taken.items() if step < state["steps"]}
        self.commits = {step: each for step, each in self.commits.items() if step < state["steps"]}
        self.admitted = set(range(state["next_group"])) - set(state["unsettled"])
        if self.admitted != set(self.settled):
            self._wrong(f"the history of {state['steps']} steps settles other groups than its steps have")
        self.in_flight, self.ready, self.replaced = set(), {}, set()
        self.published, self.kept = set(), set()
        self.starts = max(self.starts, event["attempts"], state["attempts"])

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

    def _keep(self, event: Mapping[str, Any]) -> None:
        self.admitted |= set(event["started"])
        self.in_flight |= set(event["started"])
        self.kept |= set(event["started"])

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

    def check_end(self) -> None:
        """Note the groups that were started and have no end."""
        again = [group for group, times in Counter(self.settled).items() if times > 1]
        if again:
            self._wrong(f"groups {again[:10]} are in two steps")
        if lost := sorted(self.admitted - set(self.settled)):
            self._wrong(f"{len(lost)} groups were admitted and have no end: {lost[:10]}")


# --- both sides together


def check_run(run_dir: Path) -> AccountingReport:
    """Check a finished run. Raises UnreadableRun if its files cannot be judged."""
    report = AccountingReport()
    rollout = RolloutSide(report)
    rollout.follow(_json_lines(_present(run_dir / "schedule.jsonl")))
    records = _step_records(_json_lines(_present(run_dir / "metrics.jsonl")), report)
    rules = read_rules(run_dir, rollout.pace, records)
    batches = read_batches(run_dir / "batches")
    report.steps = len(records)
    report.expect("counts", "steps in metrics.jsonl", sorted(records), list(range(1, rules.steps + 1)))
    report.expect("counts", "steps in batches/", sorted(batches), list(range(rules.steps)))
    report.expect("counts", "steps that the controller committed", sorted(rollout.commits), list(range(rules.steps)))
    steps: dict[int, list[CountedGroup]] = {}
    for step, (version, rows) in sorted(batches.items()):
        report.expect("versions", f"step {step} trains weights of version", version, step * rules.updates)
        steps[step] = recount(step, version, rows, rules, report)
        _check_step(step, steps[step], rollout, records.get(step + 1, {}), rules, report)
    rollout.check_end()
    report.admitted = len(rollout.admitted)
    _check_totals(run_dir, rollout, records, report)
    _check_repetitions(steps, rules, report)
    _check_engines(run_dir, records, rules, report)
    return report


def read_rules(run_dir: Path, pace: Mapping[str, int], records: Mapping[int, Mapping[str, Any]]) -> Rules:
    """Return the settings of a run."""
    import yaml

    config = yaml.safe_load(_present(run_dir / "config.yaml").read_text(encoding="utf-8"))
    if not pace:
        raise UnreadableRun(f"{run_dir / 'schedule.jsonl'}: no attempt of the run has begun")
    data = Path(config["data"]["path"])
    lines = [line for line in _present(data).read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(set(lines)) != len(lines):
        raise UnreadableRun(f"{data} has equal lines: whether a prompt is twice in an epoch cannot be told")
    skipped = sum(int(record.get("rollout/skipped_prompts") or 0) for record in records.values())
    return Rules.of(config, pace["max_staleness"], len(lines) - skipped)


def _check_step(
    step: int,
    groups: Sequence[CountedGroup],
    rollout: RolloutSide,
    record: Mapping[str, Any],
    rules: Rules,
    report: AccountingReport,
) -> None:
    """Compare the recount of a step with the schedule and with the step's metrics."""
    taken = rollout.taken.get(step, {"ok": [], "failed": [], "replaced": []})
    ids = [group.number for group in groups]
    report.expect("groups", f"step {step}: groups in the batch", ids, sorted(taken["ok"] + taken["failed"]))
    ends = Counter(group.end for group in groups)
    ends["filtered"] += len(taken["replaced"])
    report.ends += ends
    for name, told in (("controller", rollout.commits.get(step, {})), ("metrics", _group_metrics(record))):
        for end in ENDS:
            report.expect("counts", f"step {step}, {end}: {name} say", told.get(end), ends[end])
    if (admitted := record.get("groups/admitted")) != len(ids) + len(taken["replaced"]):
        report.problems["counts"].append(f"step {step}: groups/admitted is {admitted}, {len(ids)} are in the batch")
    report.expect("counts", f"step {step}: groups in the batch", len(ids), rules.groups)
    failed = sorted(group.number for group in groups if group.end == "failed")
    report.expect("counts", f"step {step}: groups failed by their rows", failed, sorted(taken["failed"]))
    for group in groups:
        told_versions = rollout.versions.get(group.number)
        report.expect("versions", f"group {group.number}: versions of its rows", group.versions, told_versions)
    _check_age(step, groups, record, rules, report)


def _group_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    return {end: record.get(f"groups/{end}") for end in ENDS}


def _check_age(
    step: int, groups: Sequence[CountedGroup], record: Mapping[str, Any], rules: Rules, report: AccountingReport
) -> None:
    """Compare what was trained with what the rules train: its oldest token, its samples, its tokens."""
    trained = [group for group in groups if group.end == "trained"]
    oldest = max((group.lag for group in trained if group.lag is not None), default=0)
    report.oldest = max(report.oldest, oldest)
    told = record.get("batch/staleness_max") or 0
    if told > rules.bound:
        report.problems["staleness"].append(
            f"step {step} trained a token {told} updates old; the bound is {rules.bound}"
        )
    if rules.updates == 1:  # with more, it depends on the update that trains the group
        report.expect("staleness", f"step {step}: batch/staleness_max", told, oldest)
    for name in ("trained_samples", "loss_tokens", "trained_tokens"):
        wanted = sum(getattr(group, name) for group in trained)
        found = record.get(f"batch/{name}")
        report.expect("staleness", f"step {step}: batch/{name} of the groups that may be trained", found, wanted)


def _check_totals(
    run_dir: Path, rollout: RolloutSide, records: Mapping[int, Mapping[str, Any]], report: AccountingReport
) -> None:
    """Compare the sums over the run: the recount's, the metrics' and those of the rollout side."""
    last = records[max(records)] if records else {}
    for end in ENDS:
        report.expect("counts", f"total/groups_{end}", last.get(f"total/groups_{end}"), report.ends[end])
        committed = sum(each[end] for each in rollout.commits.values())
        report.expect("counts", f"{end} groups that the controller committed", committed, report.ends[end])
    total = report.ends.total()
    report.expect("counts", "total/groups_admitted", last.get("total/groups_admitted"), total)
    report.expect("counts", "groups that the controller has admitted", len(rollout.admitted), total)
    attempts = json.loads(_present(run_dir / "attempts.json").read_text(encoding="utf-8"))["attempts"]
    report.expect("groups", "groups ever started, by attempts.json", attempts, rollout.starts)


def _check_repetitions(steps: Mapping[int, Sequence[CountedGroup]], rules: Rules, report: AccountingReport) -> None:
    """Note groups that are in two batches, and prompts that two groups of one epoch have.

    Group g has draw number g of the data set, so its epoch is g divided by the number of prompts.
    """
    places: dict[int, int] = {}
    prompts: dict[tuple[int, tuple[int, ...]], int] = {}
    for step, groups in steps.items():
        for group in groups:
            if group.number in places:
                text = f"group {group.number} is in the batches of steps {places[group.number]} and {step}"
                report.problems["groups"].append(text)
            places[group.number] = step
            if not group.prompt:
                continue  # it failed before its prompt was sent
            epoch = group.number // rules.prompts
            other = prompts.setdefault((epoch, group.prompt), group.number)
            if other != group.number:
                report.problems["epochs"].append(f"epoch {epoch}: groups {other} and {group.number} have one prompt")
    report.prompts_twice = len(report.problems["epochs"])


def _check_engines(
    run_dir: Path, records: Mapping[int, Mapping[str, Any]], rules: Rules, report: AccountingReport
) -> None:
    """Count the engine processes that have written to the logs of the replicas."""
    logs = sorted((run_dir / "logs").glob("replica-*.log"))
    started = [set(_ENGINE.findall(log.read_text(encoding="utf-8", errors="replace"))) for log in logs]
    report.engine_starts = sum(map(len, started))
    report.engine_restarts = sum(int(each.get("sync/restarted_replicas") or 0) for each in records.values())
    report.expect("engines", "replicas with a log", len(logs), rules.replicas)
    report.expect("engines", "engines started", report.engine_starts, rules.replicas + report.engine_restarts)


def _step_records(lines: Iterable[dict[str, Any]], report: AccountingReport) -> dict[int, dict[str, Any]]:
    """Return the training steps of metrics.jsonl by the number of steps done."""
    records: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "time/step" in line:
            if line["step"] in records:
                report.problems["counts"].append(f"step {line['step']} is twice in metrics.jsonl")
            records[line["step"]] = line
    return records


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; an incomplete last line, of a killed process, is left out."""
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError:
            raise UnreadableRun(f"{path}, line {number} is not JSON: {line[:80]!r}") from None


def _present(path: Path) -> Path:
    if not path.is_file():
        raise UnreadableRun(f"{path} is missing: the run must have telemetry.dump_batches, and must have ended")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="the directory of a finished run")
    try:
        report = check_run(parser.parse_args().run_dir)
    except UnreadableRun as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
