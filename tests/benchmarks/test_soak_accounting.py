"""The independent count of a run's groups: it agrees with real runs, and finds whatever is changed in their files."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_accounting import AccountingReport, Rules, UnreadableRun, check_run, main
from benchmarks.soak_batches import judge
from benchmarks.soak_problems import CHECKS
from benchmarks.soak_schedule import RolloutSide
from megarl.rollout.journal_file import JournalFile
from tests.support.soak_runs import edit_lines, edit_rows, write_run

Change = Callable[[dict[str, Any]], dict[str, Any] | None]


def found(run_dir: Path) -> dict[str, list[str]]:
    """The problems by check, without the checks that have none."""
    return {name: each for name, each in check_run(run_dir).problems.items() if each}


@pytest.mark.parametrize("seed", range(12))
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
    assert report.engine_starts == 2 and report.engine_restarts == 0
    assert 0 < report.oldest <= 4


@pytest.mark.parametrize("seed", range(4))
def test_the_groups_of_a_skipped_step_have_failed(tmp_path: Path, seed: int) -> None:
    report = check_run(write_run(tmp_path, seed, skipped={2, 5}, trainer__mini_batches=1 + seed % 2))
    assert report.ok, "\n".join(report.lines())
    assert report.skipped == 2 and report.ends["failed"] >= 4


def trained_again(run_dir: Path) -> None:
    """The batch of step 2 was kept as a failed one in an attempt before, and recorded again since."""
    for path in (run_dir / "failed_batch").iterdir():
        os.utime(path, (1, 1))


def test_a_step_that_a_resume_has_made_again_was_not_skipped(tmp_path: Path) -> None:
    """Here it claims to have failed all the same, which no file explains."""
    run_dir = write_run(tmp_path, 0, skipped={2})
    trained_again(run_dir)
    assert check_run(run_dir).skipped == 0
    assert any("step 2, trained: " in each and "say: 0" in each for each in found(run_dir)["counts"])
    sound = write_run(tmp_path / "sound", 0)
    (sound / "failed_batch").mkdir()
    for path in (sound / "batches").glob("step_000002.*"):
        shutil.copy(path, sound / "failed_batch")
    trained_again(sound)
    assert check_run(sound).ok


def test_a_skipped_step_that_has_trained_is_found(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 0, skipped={3})
    edit_lines(run_dir / "metrics.jsonl", lambda line: line | {"policy/grad_norm": 0.5})
    assert found(run_dir) == {"finite": ["step 3 was skipped, and policy/grad_norm is 0.5"]}


def test_engines_that_were_added_are_explained_by_the_log_of_the_controller(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 0)
    (run_dir / "logs" / "replica-2.log").write_text("(EngineCore pid=99) a line\n")
    assert set(found(run_dir)) == {"engines"}
    (run_dir / "logs" / "controller.log").write_text("12:00 INFO starting replicas [2]\n")
    report = check_run(run_dir)
    assert report.ok and report.engine_starts == 3 and report.engine_restarts == 0
    grown = "12:00 WARNING notice: 1 engines that were lost are up again; they join with the next publication\n"
    (run_dir / "logs" / "controller.log").write_text(grown)
    assert check_run(run_dir).ok, "a host was back"
    (run_dir / "logs" / "controller.log").write_text("12:00 INFO starting replicas [2, 3]\n")
    assert found(run_dir) == {}, "the second one was still being started"
    (run_dir / "logs" / "replica-0.log").write_text("")
    (run_dir / "logs" / "replica-2.log").write_text("")
    assert set(found(run_dir)) == {"engines"}, "one that was there at the start is missing"


def test_every_end_is_met(tmp_path: Path) -> None:
    """Failed, filtered and trained groups occur in the runs of the test above; stale ones are judged below."""
    totals = [check_run(write_run(tmp_path / str(seed), seed)).ends for seed in range(3)]
    assert all(sum(each[end] for each in totals) > 0 for end in ("trained", "filtered", "failed"))


# --- changed files: each is found, by the check that it concerns


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


def a_restart_untold(run_dir: Path) -> None:
    with (run_dir / "logs" / "replica-1.log").open("a") as log:
        log.write("(EngineCore pid=99) WARNING a line\n")


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
        (a_restart_untold, "engines"),
        (lambda run_dir: JournalFile(run_dir / "rollout.journal").count(27), "groups"),
    ],
)  # fmt: skip
def test_a_changed_file_is_found(tmp_path: Path, tamper: Callable[[Path], None], check: str) -> None:
    run_dir = write_run(tmp_path, seed=1)
    assert found(run_dir) == {}
    tamper(run_dir)
    problems = found(run_dir)
    assert check in problems, problems
    assert problems[check][0]


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (group_twice, "is in the batches of steps 2 and 3"),
        (schedule_event("admit", lambda event: event | {"groups": [0, *event["groups"]]}, number=2), "admitted twice"),
        (schedule_event("finish", lambda event: event | {"versions": [9]}), "never published"),
    ],
)
def test_what_several_checks_find_each_of_them_finds(tmp_path: Path, tamper: Callable[[Path], None], text: str) -> None:
    run_dir = write_run(tmp_path, seed=1)
    tamper(run_dir)
    assert any(text in each for problems in found(run_dir).values() for each in problems)


def test_a_group_that_is_trained_too_old_is_named(tmp_path: Path) -> None:
    """The trainer says that it trained the samples, and the rules drop the group: both counts show it."""
    run_dir = write_run(tmp_path, seed=1)
    too_old(run_dir)
    problems = found(run_dir)
    assert set(problems) == {"counts", "staleness"}
    assert any("dropped_stale" in each for each in problems["counts"])
    assert any("trained_samples" in each for each in problems["staleness"])


def stop_after(run_dir: Path, step: int) -> None:
    """Make a run that was killed: its metrics have so many steps, its schedule ends in the middle of the next one."""
    edit_lines(run_dir / "metrics.jsonl", lambda line: line if line["step"] <= step else None)
    path = run_dir / "schedule.jsonl"
    events = path.read_text().splitlines()
    [taken] = [i for i, each in enumerate(map(json.loads, events)) if each.get("step") == step and "ok" in each]
    path.write_text("".join(f"{each}\n" for each in events[: taken + 1]))
    for part in sorted((run_dir / "batches").glob(f"step_{step:06d}.1-*")):
        part.unlink()  # the other one was written


def test_a_run_that_was_stopped_is_counted_up_to_the_last_step_that_it_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path, seed=1)
    stop_after(run_dir, 5)
    with pytest.raises(UnreadableRun, match="step 5 has parts"):
        check_run(run_dir)
    report = check_run(run_dir, stopped=True)
    assert report.ok and report.steps == 5, "\n".join(report.lines())
    assert report.ends.total() < report.admitted, "no group was under way"
    monkeypatch.setattr("sys.argv", ["soak_accounting.py", "--stopped", str(run_dir)])
    assert main() == 0
    journal = JournalFile(run_dir / "rollout.journal")
    journal.count(999)
    assert check_run(run_dir, stopped=True).ok, "groups are counted on the disk before they are started"
    journal.count(5)
    assert check_run(run_dir, stopped=True).problems["groups"]


def test_an_engine_that_is_being_replaced_when_a_run_is_stopped_has_not_said_its_name(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, seed=1)
    restart = {"sync/restarted_replicas": 1.0}
    edit_lines(run_dir / "metrics.jsonl", lambda line: line | restart if line["step"] == 5 else line)
    assert set(found(run_dir)) == {"engines"}
    stop_after(run_dir, 5)
    assert check_run(run_dir, stopped=True).ok
    (run_dir / "logs" / "replica-1.log").write_text("")
    assert check_run(run_dir, stopped=True).problems["engines"], "one that was there at the start is missing"


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


def test_the_exit_status_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path)
    monkeypatch.setattr("sys.argv", ["soak_accounting.py", str(run_dir)])
    assert main() == 0 and all(f"{name}: ok" in capsys.readouterr().out for name in list(CHECKS)[:1])
    metric("groups/failed", 1)(run_dir)
    assert main() == 1 and "counts: 1 problems" in capsys.readouterr().out
    (run_dir / "schedule.jsonl").unlink()
    assert main() == 2 and "schedule.jsonl is missing" in capsys.readouterr().err


def test_files_that_cannot_be_judged_are_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    part = next((run_dir / "batches").glob("step_000002.1-*"))
    part.unlink()
    with pytest.raises(UnreadableRun, match="step 2 has parts"):
        check_run(run_dir)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write((tmp_path / "train.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(UnreadableRun, match="equal lines"):
        check_run(run_dir)
    with pytest.raises(UnreadableRun, match="max_uses > 1 is not supported"):
        check_run(write_run(tmp_path / "again", admission={"max_uses": 2}))


# --- the rules, one group at a time

RULES = Rules(
    steps=1, groups=1, samples=2, updates=1, bound=4, truncated="keep", filters=True, replicas=1, prompts=1
)  # fmt: skip


def row(reward: float, version: int = 6, *, lost: int = 0, status: str = "ok", cut: bool = False) -> dict[str, Any]:
    return {
        "prompt_ids": [1, 2, 3],
        "response_ids": [7, 8],
        "response_mask": [1, 0],
        "versions": [{"version": version, "start": 0, "end": 2, "lost": lost, "epoch": 0}],
        "reward": reward,
        "status": status,
        "finish_reason": "length" if cut else "stop",
    }


@pytest.mark.parametrize(
    ("group", "changes", "end"),
    [
        ([row(0.0), row(1.0)], {}, "trained"),
        ([row(1.0), row(1.0)], {}, "filtered"),
        ([row(1.0), row(1.0)], {"filters": False}, "trained"),
        ([row(0.0), row(1.0, status="failed")], {}, "failed"),
        ([row(0.0), row(1.0, version=2)], {}, "trained"),
        ([row(0.0), row(1.0, version=1)], {}, "dropped_stale"),
        ([row(0.0), row(1.0, version=2)], {"updates": 2}, "dropped_stale"),
        ([row(0.0), row(1.0, version=4, lost=1)], {}, "trained"),
        ([row(0.0), row(1.0, version=5, lost=2)], {}, "dropped_stale"),
        ([row(0.0), row(1.0), row(1.0, version=1, status="failed")], {}, "trained"),
        ([row(0.0, version=1), row(1.0, status="failed")], {}, "failed"),
        ([row(0.0, version=1), row(1.0), row(1.0, status="failed")], {}, "dropped_stale"),
        ([row(0.0), row(1.0, cut=True)], {"truncated": "zero_reward"}, "filtered"),
        ([row(0.0), row(1.0, cut=True)], {"truncated": "mask"}, "trained"),
    ],
)
def test_the_rules(group: list[dict[str, Any]], changes: dict[str, Any], end: str) -> None:
    rules = Rules(**(vars(RULES) | changes))
    assert judge(5, group, 6, rules).end == end


def test_what_a_trained_group_adds(tmp_path: Path) -> None:
    group = [row(0.0), row(1.0, cut=True), row(1.0, status="failed")]
    judged = judge(5, group, 6, Rules(**(vars(RULES) | {"truncated": "mask"})))
    assert (judged.trained_samples, judged.loss_tokens, judged.trained_tokens, judged.lag) == (1, 1, 10, 0)


def test_a_report_with_a_problem_is_not_ok() -> None:
    report = AccountingReport()
    assert report.ok
    report.expect("epochs", "prompts", 1, 1)
    assert report.ok
    report.expect("epochs", "prompts", 2, 1)
    assert not report.ok and "    prompts: 2, but 1" in list(report.lines())


# --- attempts that a fault has ended


def begin(attempts: int, steps: int = 0) -> dict[str, Any]:
    state = {"steps": steps, "next_group": 0, "unsettled": [], "attempts": 0}
    return {"event": "begin", "state": state, "pace": {"updates_per_step": 1}, "attempts": attempts}


@pytest.mark.parametrize(("known", "sound"), [(7, True), (4, True), (5, False), (3, False), (8, False)])
def test_an_attempt_knows_all_groups_that_were_started_but_those_admitted_last(known: int, sound: bool) -> None:
    """The count is on the disk before the groups start: after a crash in between they are admitted, and not started."""
    report = AccountingReport()
    side = RolloutSide(report)
    side.follow([begin(0), {"event": "admit", "groups": [0, 1, 2, 3]}, {"event": "admit", "groups": [4, 5, 6]}])
    side.follow([begin(known)])
    assert side.starts == known and side.begins == 2
    assert report.problems["groups"] == (
        [] if sound else [f"schedule: 7 groups were started, and the next attempt knows of {known}"]
    )


@pytest.mark.parametrize(
    ("engines", "attempts", "pools", "sound"),
    [(2, 1, 1, True), (4, 1, 1, False), (4, 2, 1, True), (5, 2, 1, False), (4, 2, 2, True), (7, 2, 2, False)],
)
def test_each_pool_starts_all_engines_and_an_attempt_that_was_cut_short_may_have_restarted_some(
    tmp_path: Path, engines: int, attempts: int, pools: int, sound: bool
) -> None:
    run_dir = write_run(tmp_path)
    schedule = run_dir / "schedule.jsonl"
    first, rest = schedule.read_text().split("\n", 1)
    schedule.write_text("\n".join([first] * attempts) + "\n" + rest)
    log = "".join(f"(EngineCore pid={10 + number}) a line\n" for number in range(engines))
    (run_dir / "logs" / "replica-0.log").write_text(log)
    (run_dir / "logs" / "replica-1.log").write_text("")
    told = 'now INFO __main__: supervisor of /run: {"attempt": 0, "launch": "1"}\n'
    (run_dir / "logs" / "supervisor.log").write_text(told * pools)
    assert bool(found(run_dir)) != sound


def test_restarts_of_steps_that_were_rolled_back_count(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    (run_dir / "logs" / "replica-0.log").write_text("(EngineCore pid=7)\n(EngineCore pid=9)\n")
    assert set(found(run_dir)) == {"engines"}
    line = {"file": "metrics.jsonl", "step": 3, "time/step": 1.0, "sync/restarted_replicas": 1}
    (run_dir / "rolled_back.jsonl").write_text(json.dumps(line) + "\n" + '{"file": "samples.jsonl", "step": 3}\n')
    assert found(run_dir) == {}
