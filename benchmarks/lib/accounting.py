"""Counts again, from a run's files alone, how every prompt group ended, and compares both sides of the run.

    python -m benchmarks.lib.accounting [--stopped] RUN_DIR

It imports nothing of megarl: the rules are written down here a second time. The trainer's side is recounted from the
rows of batches/*.parquet, the rollout side from the group ids in schedule.jsonl; both are compared with each other and
with what the run says of itself (metrics.jsonl). A run that is checked needs `telemetry.dump_batches`,
one data set, and a training file without equal prompts. Its trainer may have been killed and resumed. With `--stopped`
the run may have ended before its last step: the steps in its metrics are counted, and groups under way need no end.

The files have no list of the groups that were trained. The trainer's numbers of trained samples and tokens take its
place: they must be those of the groups that are trained by the rules.

The two sides are in lib/recount.py.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.recount import (
    ENDS,
    AccountingReport,
    CountedGroup,
    RolloutSide,
    Rules,
    UnreadableRun,
    check_rewards,
    find_skipped,
    is_finite,
    read_batches,
    recount,
    skip,
)


def check_run(run_dir: Path, *, stopped: bool = False) -> AccountingReport:
    """Check a run that has ended; with `stopped` maybe before its last step.

    Raises UnreadableRun if its files cannot be judged.
    """
    report = AccountingReport()
    rollout = RolloutSide(report)
    rollout.follow(_json_lines(_present(run_dir / "schedule.jsonl")))
    records = _step_records(_lines_of_parts(_present(run_dir / "metrics.jsonl")), report)
    rules = read_rules(run_dir, rollout.pace, records)
    if stopped:
        rules = replace(rules, steps=len(records))
        rollout.end_at(rules.steps)
    batches = read_batches(run_dir / "batches", rules.steps if stopped else None)
    report.steps = len(records)
    report.expect("counts", "steps in metrics.jsonl", sorted(records), list(range(1, rules.steps + 1)))
    report.expect("counts", "steps in batches/", sorted(batches), list(range(rules.steps)))
    report.expect("counts", "steps that the controller committed", sorted(rollout.commits), list(range(rules.steps)))
    steps: dict[int, list[CountedGroup]] = {}
    skipped, seen = find_skipped(run_dir, batches), dict[tuple[object, ...], float]()
    report.skipped = len(skipped)
    for step, (version, rows) in sorted(batches.items()):
        report.expect("versions", f"step {step} trains weights of version", version, step * rules.updates)
        steps[step] = recount(step, version, rows, rules, report)
        check_rewards(step, rows, rules, seen, report)
        if not is_finite(rows) and step not in skipped:
            report.problems["finite"].append(f"step {step} has log-probs that are not finite, and was not skipped")
        failed = sorted(group.number for group in steps[step] if group.end == "failed")
        reported = sorted(rollout.taken.get(step, {}).get("failed", []))
        report.expect("counts", f"step {step}: groups failed by their rows", failed, reported)
        if step in skipped:
            steps[step] = skip(steps[step])
            _check_skipped(step, records.get(step + 1, {}), report)
        _check_step(step, steps[step], rollout, records.get(step + 1, {}), rules, report)
    rollout.check_end(stopped)
    report.admitted = len(rollout.admitted)
    _check_totals(rollout, records, report, stopped)
    _check_repetitions(steps, rules, report)
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
        raise UnreadableRun(f"{data} has equal lines: whether a prompt is twice in an epoch cannot be known")
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
    metrics = {end: record.get(f"groups/{end}") for end in ENDS}
    for name, reported in (("controller", rollout.commits.get(step, {})), ("metrics", metrics)):
        for end in ENDS:
            report.expect("counts", f"step {step}, {end}: {name} say", reported.get(end), ends[end])
    if (admitted := record.get("groups/admitted")) != len(ids) + len(taken["replaced"]):
        report.problems["counts"].append(f"step {step}: groups/admitted is {admitted}, {len(ids)} are in the batch")
    report.expect("counts", f"step {step}: groups in the batch", len(ids), rules.groups)
    for group in groups:
        told_versions = rollout.versions.get(group.number)
        report.expect("versions", f"group {group.number}: versions of its rows", group.versions, told_versions)
    _check_age(step, groups, record, rules, report)


def _check_skipped(step: int, record: Mapping[str, Any], report: AccountingReport) -> None:
    """Check that the metrics of a skipped step have no update."""
    for name in ("groups/trained", "policy/grad_norm"):
        if record.get(name):
            report.problems["finite"].append(f"step {step} was skipped, and {name} is {record[name]}")


def _check_age(
    step: int, groups: Sequence[CountedGroup], record: Mapping[str, Any], rules: Rules, report: AccountingReport
) -> None:
    """Compare what was trained with what the rules train: its oldest token, its samples, its tokens."""
    trained = [group for group in groups if group.end == "trained"]
    oldest = max((group.lag for group in trained if group.lag is not None), default=0)
    report.oldest = max(report.oldest, oldest)
    reported = record.get("batch/staleness_max") or 0
    if reported > rules.bound:
        report.problems["staleness"].append(
            f"step {step} trained a token {reported} updates old; the bound is {rules.bound}"
        )
    if rules.updates == 1:  # with more, it depends on the update that trains the group
        report.expect("staleness", f"step {step}: batch/staleness_max", reported, oldest)
    for name in ("trained_samples", "loss_tokens", "trained_tokens"):
        wanted = sum(getattr(group, name) for group in trained)
        found = record.get(f"batch/{name}") or 0
        report.expect("staleness", f"step {step}: batch/{name} of the groups that may be trained", found, wanted)


def _check_totals(
    rollout: RolloutSide, records: Mapping[int, Mapping[str, Any]], report: AccountingReport, stopped: bool
) -> None:
    """Compare the sums over the run: the recount's, the metrics' and those of the rollout side.

    A run that was stopped has admitted more groups than its steps have, and may have rolled back some of which no step
    has reported any more.
    """
    last = records[max(records)] if records else {}
    for end in ENDS:
        report.expect("counts", f"total/groups_{end}", last.get(f"total/groups_{end}"), report.ends[end])
        committed = sum(each[end] for each in rollout.commits.values())
        report.expect("counts", f"{end} groups that the controller committed", committed, report.ends[end])
    total = report.ends.total()
    report.expect("counts", "total/groups_admitted", last.get("total/groups_admitted"), total)
    rolled_back = rollout.starts - len(rollout.admitted)
    reported = last.get("total/groups_rolled_back") or 0
    if not stopped:
        report.expect("counts", "groups that the controller has admitted", len(rollout.admitted), total)
    if not stopped or reported > rolled_back:
        report.expect("groups", "total/groups_rolled_back", reported, rolled_back)


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


def _lines_of_parts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines and of its older parts, which have a number in their names."""
    for part in sorted(path.parent.glob(f"{path.stem}.*{path.suffix}")):
        yield from _json_lines(part)
    yield from _json_lines(path)


def _present(path: Path) -> Path:
    if not path.is_file():
        raise UnreadableRun(f"{path} is missing: the run must have telemetry.dump_batches, and must have ended")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="the directory of a run that has ended")
    parser.add_argument("--stopped", action="store_true", help="it may have ended before its last step")
    options = parser.parse_args()
    try:
        report = check_run(options.run_dir, stopped=options.stopped)
    except UnreadableRun as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report.lines()))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
