"""The soak without its runs: its judges find what is wrong with a run, in its rows, in its files, after its faults."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.accounting import check_run
from benchmarks.lib.chaos import KINDS, Fault, Happened, SoakOutcome, loss_rows, rows_of, schedule
from benchmarks.lib.recount import AccountingReport
from tests.support.runs.soak_runs import edit_lines, edit_rows, write_run

SCHEDULE = schedule(0, ["kill-engine", "pause-replica"], replicas=2, first=3, last=20)


def outcome(name: str, accuracy: float = 0.9, **changes: Any) -> SoakOutcome:
    report = AccountingReport(ends=Counter(trained=90, filtered=30), steps=5, admitted=120, oldest=4)
    records = [{"sync/restarted_replicas": 1.0, "rollout/continued": 3.0, "reward/errors": 4.0}]
    values = {
        "records": records, "report": report, "happened": hit(), "late_rewards": 4,
        "summary": {"eval_after": {"greedy": accuracy, "sampled": accuracy}},
    }  # fmt: skip
    return SoakOutcome(name, **(values | changes))


def hit(**changes: Any) -> list[Happened]:
    """Each fault of the schedule once."""
    values = {"over": True, "busy": True, "continued": 3, "restarted": 1} | changes
    return [Happened(fault, 1, 4, 9.0, **values) for fault in SCHEDULE]


def event(name: str, **changes: Any) -> Happened:
    values = {"over": True, "spoiled": int(KINDS[name].action == "spoil")} | changes
    return Happened(Fault(KINDS[name], 0, 5, 0.0, 0.0), 1, 4, 9.0, **values)


def missed(calm: SoakOutcome, disturbed: SoakOutcome, minutes: float = 10.0) -> list[str]:
    return [row.name for row in rows_of(calm, disturbed, SCHEDULE, minutes, 20.0) if not row.ok]


def test_a_good_soak_misses_nothing() -> None:
    assert missed(outcome("undisturbed"), outcome("disturbed", accuracy=0.875)) == []


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"accuracy": 0.86}, "final accuracy, greedy"),
        ({"summary": {}}, "final accuracy, sampled"),
        ({"failure": "did not end within 600 s", "report": None}, "disturbed: ended"),
        ({"failure": "x", "report": None}, "disturbed: accounting"),
        ({"left": ["sleep (pid 7)"]}, "disturbed: processes left"),
        ({"happened": []}, "faults survived"),
        ({"records": []}, "replicas restarted"),
        ({"records": [{"sync/restarted_replicas": 2.0, "reward/errors": 4.0}]}, "replicas restarted without"),
        ({"happened": hit(continued=0)}, "responses continued"),
        ({"happened": hit(continued=9) + hit(continued=0)}, "responses continued"),
        ({"happened": hit(busy=False)}, "responses continued"),
        ({"happened": hit(restarted=0)}, "replicas restarted without"),
        ({"records": [{"sync/restarted_replicas": 3.0}], "happened": hit(restarted=3)}, "replicas restarted without"),
        ({"late_rewards": 5}, "reward time-outs"),
        ({"late_rewards": 3}, "reward time-outs"),
        ({"late_rewards": 0}, "reward time-outs"),
        ({"late_rewards": 3, "happened": [*hit(), event("kill-rank")]}, "reward time-outs"),
        ({"late_rewards": 2, "happened": [*hit(), event("hang-reward")]}, "reward time-outs"),
        ({"late_rewards": 5, "happened": [*hit(), event("flood-reward")]}, "reward time-outs"),
        ({"late_rewards": 3, "happened": [*hit(), event("kill-agent-worker")]}, "reward time-outs"),
        ({"late_rewards": 5, "happened": [*hit(), event("flood-agent-worker")]}, "reward time-outs"),
        ({"report": AccountingReport(oldest=5)}, "disturbed: oldest token"),
        ({"report": AccountingReport(skipped=1)}, "steps skipped"),
        ({"report": AccountingReport(skipped=2), "happened": [*hit(), event("spoil-gradient")]}, "steps skipped"),
    ],
)
def test_a_bad_soak_misses_its_bound(changes: dict[str, Any], row: str) -> None:
    assert any(name.startswith(row) for name in missed(outcome("undisturbed"), outcome("disturbed", **changes)))


@pytest.mark.parametrize(("name", "restarted", "unexplained"), [
    ("kill-engine-idle", 1, 0), ("kill-engine-idle", 2, 1), ("kill-engine", 2, 1), ("kill-replica", 2, 1),
    ("hang-engine", 2, 1), ("crawl-engine", 2, 1), ("pause-engine", 1, 1),
    ("kill-engine-in-sync", 2, 0), ("hang-engine-in-sync", 2, 0), ("kill-engine-in-sync", 3, 1),
    ("kill-controller", 2, 0), ("kill-rank", 2, 0),
])  # fmt: skip
def test_a_fault_of_one_replica_explains_one_and_in_the_middle_of_a_sync_all(
    name: str, restarted: int, unexplained: int
) -> None:
    happened = [event(name, restarted=restarted, continued=3)]
    records = [{"sync/restarted_replicas": float(restarted)}]
    rows = loss_rows(outcome("disturbed", records=records, happened=happened))
    [row] = [each for each in rows if each.name == "replicas restarted without a loss"]
    assert (row.ratio, row.ok) == (unexplained, not unexplained)


# --- the files of a run: what is changed is found, by the check that it concerns

Change = Callable[[dict[str, Any]], dict[str, Any] | None]


def found(run_dir: Path) -> dict[str, list[str]]:
    """The problems by check, without the checks that have none."""
    return {name: each for name, each in check_run(run_dir).problems.items() if each}


@pytest.mark.parametrize("seed", range(3))
def test_a_sound_run_has_no_problem(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    changes: dict[str, Any] = {
        "trainer__mini_batches": rng.choice((1, 1, 2)),
        "admission__refill": rng.random() < 0.4,
        "sampling__truncated": rng.choice(("keep", "mask", "zero_reward")),
    }
    run_dir = write_run(tmp_path, seed, **changes)
    report = check_run(run_dir)
    assert report.ok, "\n".join(report.lines())
    assert report.steps == 7 and report.ends.total() == report.admitted >= 28
    assert 0 < report.oldest <= 4


def schedule_event(name: str, change: Change, number: int = 3) -> Callable[[Path], None]:
    """Change the event of a name that comes as number `number`."""

    def tamper(run_dir: Path) -> None:
        seen = 0

        def edit(event: dict[str, Any]) -> dict[str, Any] | None:
            nonlocal seen
            seen += event["event"] == name
            return change(event) if event["event"] == name and seen == number else event

        edit_lines(run_dir / "schedule.jsonl", edit)

    return tamper


def metric(name: str, by: float, step: int = 4) -> Callable[[Path], None]:
    """Change a metric of one step."""

    def edit(line: dict[str, Any]) -> dict[str, Any]:
        return line | {name: line[name] + by} if line["step"] == step else line

    return lambda run_dir: edit_lines(run_dir / "metrics.jsonl", edit)


def rows(change: Change, step: int = 3) -> Callable[[Path], None]:
    """Change the rows of one step's batch."""

    def tamper(run_dir: Path) -> None:
        for path in sorted((run_dir / "batches").glob(f"step_{step:06d}.*")):
            edit_rows(path, change)

    return tamper


def first_group(run_dir: Path, step: int) -> int:
    for line in (run_dir / "schedule.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "batch" and event["step"] == step:
            return min(event["ok"])
    raise AssertionError(f"step {step} was not taken")


def group_twice(run_dir: Path) -> None:
    """Step 3 has a group of step 2 again instead of its own first one."""
    old, new = first_group(run_dir, 3), first_group(run_dir, 2)
    rows(lambda row: row | {"group_id": new if row["group_id"] == old else row["group_id"]})(run_dir)


def too_old(run_dir: Path) -> None:
    """One token of a group is older than the bound, and both sides agree on its version."""
    group = first_group(run_dir, 5)

    def age(row: dict[str, Any]) -> dict[str, Any]:
        if (row["group_id"], row["sample_index"]) == (group, 0):
            row["versions"] = [row["versions"][0] | {"version": 0, "end": len(row["response_ids"])}]
        versions.update(span["version"] for span in row["versions"] if row["group_id"] == group)
        return row

    def agree(event: dict[str, Any]) -> dict[str, Any]:
        is_it = event["event"] == "finish" and event["group"] == group
        return event | {"versions": sorted(versions)} if is_it else event

    versions: set[int] = set()
    rows(age, step=5)(run_dir)
    edit_lines(run_dir / "schedule.jsonl", agree)


def lost_group(run_dir: Path) -> None:
    """A group is in no batch, and nobody counts it."""
    group = first_group(run_dir, 6)
    rows(lambda row: None if row["group_id"] == group else row, step=6)(run_dir)
    without = {"ok": lambda groups: [each for each in groups if each != group]}
    schedule_event("batch", lambda event: event | {"ok": without["ok"](event["ok"])}, number=7)(run_dir)


def forged_reward(run_dir: Path) -> None:
    """A sample of a group that nobody trains has the reward that a forked child gives."""
    rows(lambda row: row | {"reward": 1000.0 if row["reward"] else 0.0})(run_dir)


def swapped_rewards(run_dir: Path) -> None:
    """The first two samples of some groups have each other's rewards: no count differs."""

    def swap(row: dict[str, Any]) -> dict[str, Any]:
        swaps = row["sample_index"] < 2 and row["group_id"] % 2 and row["status"] == "ok"
        return row | {"reward": 1.0 - row["reward"]} if swaps and row["group_id"] in mixed else row

    def note(row: dict[str, Any]) -> dict[str, Any]:
        rewards.setdefault(row["group_id"], set()).add(row["reward"])
        return row

    rewards: dict[int, set[float]] = {}
    for step in range(7):
        rows(note, step)(run_dir)
    mixed = {group for group, found in rewards.items() if len(found) == 2}
    for step in range(7):
        rows(swap, step)(run_dir)


def not_finite(run_dir: Path) -> None:
    """A log-prob of an engine is NaN, and the step was trained."""
    rows(lambda row: row | {"rollout_logprobs": [math.nan, *row["rollout_logprobs"][1:]]})(run_dir)


def same_prompt(run_dir: Path) -> None:
    """Two groups of an epoch have one prompt, as after a resume that draws a problem again."""
    prompts = {}

    def note(row: dict[str, Any]) -> dict[str, Any]:
        prompts[row["group_id"]] = row["prompt_ids"]
        return row

    rows(note, step=0)(run_dir)
    one, other, *_ = (group for group in sorted(prompts) if group < 10)
    rows(lambda row: row | {"prompt_ids": prompts[one]} if row["group_id"] == other else row, step=0)(run_dir)


def future_token(row: dict[str, Any]) -> dict[str, Any]:
    row["versions"][-1]["version"] += 40
    return row


def uncovered_token(row: dict[str, Any]) -> dict[str, Any]:
    row["versions"][-1]["end"] -= 1
    return row


@pytest.mark.parametrize(
    ("tamper", "check"),
    [
        (group_twice, "groups"),
        (too_old, "counts"),
        (lost_group, "groups"),
        (same_prompt, "epochs"),
        (forged_reward, "rewards"),
        (swapped_rewards, "rewards"),
        (not_finite, "finite"),
        (metric("groups/trained", 1), "counts"),
        (metric("groups/admitted", -1), "counts"),
        (metric("total/groups_filtered", 1, step=7), "counts"),
        (metric("batch/staleness_max", 3), "staleness"),
        (metric("batch/trained_samples", -1), "staleness"),
        (metric("batch/loss_tokens", 1), "staleness"),
        (schedule_event("commit", lambda event: event | {"filtered": event["filtered"] + 1}), "counts"),
        (schedule_event("commit", lambda event: None, number=7), "counts"),
        (schedule_event("finish", lambda event: None), "groups"),
        (schedule_event("finish", lambda event: event | {"versions": [9]}), "versions"),
        (schedule_event("admit", lambda event: event | {"groups": event["groups"][1:]}, number=1), "groups"),
        (schedule_event("admit", lambda event: event | {"groups": [0, *event["groups"]]}, number=2), "groups"),
        (rows(future_token), "versions"),
        (rows(uncovered_token), "versions"),
        (rows(lambda row: None if row["sample_index"] == 2 else row), "groups"),
        (rows(lambda row: row | {"status": "failed"}), "counts"),
        (rows(lambda row: row | {"reward": 1.0}), "counts"),
        (metric("total/groups_rolled_back", 1, step=7), "groups"),
    ],
)  # fmt: skip
def test_a_changed_file_is_found(tmp_path: Path, tamper: Callable[[Path], None], check: str) -> None:
    run_dir = write_run(tmp_path, seed=1)
    assert found(run_dir) == {}
    tamper(run_dir)
    problems = found(run_dir)
    assert check in problems, problems
    assert problems[check][0]


def stop_after(run_dir: Path, step: int) -> None:
    """Make a run that was killed: its metrics have so many steps, its schedule ends in the middle of the next one."""
    edit_lines(run_dir / "metrics.jsonl", lambda line: line if line["step"] <= step else None)
    path = run_dir / "schedule.jsonl"
    events = path.read_text().splitlines()
    [taken] = [i for i, each in enumerate(map(json.loads, events)) if each.get("step") == step and "ok" in each]
    path.write_text("".join(f"{each}\n" for each in events[: taken + 1]))
    for part in sorted((run_dir / "batches").glob(f"step_{step:06d}.1-*")):
        part.unlink()  # the other one was written


@pytest.mark.parametrize(
    ("tamper", "check"),
    [
        (group_twice, "groups"),
        (metric("groups/trained", 1), "counts"),
        (metric("total/groups_filtered", 1, step=5), "counts"),
        (schedule_event("commit", lambda event: None, number=3), "counts"),
        (schedule_event("finish", lambda event: None), "groups"),
        (schedule_event("admit", lambda event: event | {"groups": [0, *event["groups"]]}, number=2), "groups"),
    ],
)
def test_a_changed_file_of_a_run_that_was_stopped_is_found(
    tmp_path: Path, tamper: Callable[[Path], None], check: str
) -> None:
    run_dir = write_run(tmp_path, seed=1)
    stop_after(run_dir, 5)
    tamper(run_dir)
    assert check_run(run_dir, stopped=True).problems[check]


# --- the injector, on a run of which only the files and some processes are there
