"""The trainer's side of the soak's accounting: how each group ends by the rules, from the rows of batches/*.parquet."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from soak_problems import AccountingReport, UnreadableRun

EQUAL = 1e-8  # rewards that differ by no more are equal
# The rewards that a reward function gives to a sample that it has scored.
REWARDS = {"math": {0.0, 1.0}, "benchmarks.soak_reward:late_math": {0.0, 1.0}}
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
    replicas: int
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
            replicas=config["rollout"]["replicas"],
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
    """Tell whether all log-probs of the rows are finite, those of failed samples too."""
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
    prompt = tuple(rows[0]["prompt_ids"])
    versions = frozenset(counts_as(span) for row in rows for span in row["versions"])
    if len(alive) < 2:
        return CountedGroup(number, "failed", lag, prompt, versions)
    if lag is not None and lag > rules.bound:
        return CountedGroup(number, "dropped_stale", lag, prompt, versions)
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
