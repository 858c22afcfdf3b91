"""The soak without its runs: configs, late rewards, and rows that cannot be good without a run behind them."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak, soak_plan
from benchmarks.soak import main, note_effects, run_config, run_once
from benchmarks.soak_happened import Happened
from benchmarks.soak_hosts import Hosts
from benchmarks.soak_job_ends import JobEnds
from benchmarks.soak_kinds import KINDS, Fault, schedule
from benchmarks.soak_orders import EVALUATED, WATCH_EVALUATION, give
from benchmarks.soak_place import NODE_S, SeveralHosts
from benchmarks.soak_plan import ALONE, NEED_ANOTHER_ENGINE, QUICK_FAULTS, TOGETHER, plan_faults, wants_hosts
from benchmarks.soak_problems import AccountingReport
from benchmarks.soak_reward import is_late, late_math, marked, watched_math
from benchmarks.soak_rows import STALENESS, SoakOutcome, fault_rows, rows_of
from benchmarks.soak_variant import LEAST_SKIPPED, Tempo
from megarl.config.load import config_from_tree
from megarl.config.pace import pace_of
from megarl.config.pools import resolve_pools
from megarl.rewards.resolve import resolve
from megarl.rewards.types import RewardInput
from megarl.rewards.worker_pool import RewardPool, RewardSpec


def options(**changes: Any) -> argparse.Namespace:
    values = {"seed": 3, "steps": 120, "groups": 24, "assets": Path("assets"), "quick": False, "replicas": 2}
    return argparse.Namespace(**(values | changes))


def test_both_runs_differ_in_the_late_rewards_alone() -> None:
    calm, disturbed = (run_config(options(), Path("run"), share) for share in (0.0, 0.01))
    assert calm["reward"]["kwargs"].pop("share") == 0.0 and disturbed["reward"]["kwargs"].pop("share") == 0.01
    assert calm == disturbed


def test_the_config_is_complete_and_keeps_what_the_accounting_needs() -> None:
    config = config_from_tree(run_config(options(), Path("run"), 0.01))
    pace = pace_of(config)
    assert pace.max_staleness == STALENESS and pace.runs_ahead
    assert config.telemetry.dump_batches and config.rollout.replicas == 2 and config.weight_sync.restarts
    assert config.evaluation.sets[0].reward.function == "math", "late rewards would change the accuracy"
    hang_s = KINDS["hang-engine"].seconds[0]
    assert config.timeouts.rpc_s + config.timeouts.weight_sync_s + config.rollout.report_interval_s < hang_s
    assert KINDS["pause-engine"].seconds[1] < config.timeouts.rpc_s / 2
    # A rank that is stopped is found by a collective, and then killed by torchrun 30 s after SIGTERM.
    assert config.timeouts.collective_s + 30 < KINDS["hang-rank"].seconds[0]
    assert all(config.timeouts.rpc_s < KINDS[f"hang-{part}"].seconds[0] / 2 for part in ("controller", "queue"))
    assert KINDS["hang-reward"].seconds[0] > 3 * config.reward.timeout_s
    assert 0 < config.checkpoint.every < 10


def plan(**changes: Any) -> list[str]:
    values = {"fault_seed": 5, "faults": None, "minutes": 20.0, "replicas": None} | changes
    return [fault.kind.name for fault in plan_faults(options(**values))]


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which every fault can happen."""
    for name in ("why_no_disk", "why_no_handles", "why_no_hosts"):
        monkeypatch.setattr(soak_plan, name, lambda: "")
    return monkeypatch


@pytest.mark.usefixtures("able")
def test_faults_are_drawn_by_a_seed_that_is_printed_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = plan()
    assert len(drawn) > 3 and drawn == plan() != plan(fault_seed=6)
    assert sorted(plan(quick=True)) == sorted(QUICK_FAULTS)
    assert sorted(plan(faults="kill-job,fill-disk")) == ["fill-disk", "kill-job"]
    assert plan(faults="limit-evaluation,kill-job,exhaust-disk")[-1] == "limit-evaluation"
    capsys.readouterr()
    plan(fault_seed=None)
    seed, replicas = capsys.readouterr().out.split("--fault-seed ")[1].split(":")[0].split(" --replicas ")
    assert seed.isdigit() and replicas in "12"
    with pytest.raises(SystemExit, match="--faults: unknown faults: kill-cat; known are abort-job, add-replica, crawl"):
        plan(faults="kill-cat")


@pytest.mark.usefixtures("able")
def test_the_whole_table_is_drawn_from_and_a_part_of_the_soaks_is_on_several_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plans = [[KINDS[name] for name in plan(fault_seed=seed)] for seed in range(200)]
    assert {kind.name for kinds in plans for kind in kinds} == set(KINDS)
    for kinds in plans:
        if any(kind.needs_hosts for kind in kinds):
            assert all(kind.happens_on_hosts for kind in kinds)
    alone = sum(any(not kind.happens_on_hosts for kind in kinds) for kinds in plans)
    assert 0.6 < alone / len(plans) < 0.9
    told = capsys.readouterr().out
    assert f"not drawn: cut-link, sever-link, lose-node: {ALONE}" in told and f": {TOGETHER}" in told


@pytest.mark.usefixtures("able")
def test_a_part_of_the_soaks_has_one_engine_which_dies_and_hangs_but_is_not_taken_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: dict[int, list[list[str]]] = {1: [], 2: []}
    for seed in range(200):
        asked = options(fault_seed=seed, faults=None, minutes=20.0, replicas=None)
        faults = plan_faults(asked)
        assert {fault.index for fault in faults} <= set(range(asked.replicas))
        names = [fault.kind.name for fault in faults]
        drawn[asked.replicas].append(names)
        assert plan(fault_seed=seed, replicas=asked.replicas) == names, "what is printed repeats it"
    assert 0.1 < len(drawn[1]) / 200 < 0.35
    only = {name for names in drawn[1] for name in names}
    assert only == set(KINDS) - set(NEED_ANOTHER_ENGINE) - {"cut-link", "sever-link", "lose-node"}
    assert f"not drawn: {', '.join(name for name in KINDS if name in NEED_ANOTHER_ENGINE)}: " in capsys.readouterr().out
    assert plan(faults="drain-replica", replicas=1) == []
    config = run_config(options(replicas=1), Path("run"), 0.0)
    assert config["rollout"]["replicas"] == 1


def test_faults_that_need_hosts_put_the_soak_there_and_what_cannot_happen_there_is_told(
    able: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(plan(faults="kill-engine,lose-node,kill-job")) == ["kill-engine", "lose-node"]
    assert f": {TOGETHER}" in capsys.readouterr().out
    able.setattr(soak_plan, "why_no_hosts", lambda: "only root may make hosts")
    assert sorted(plan(faults="kill-engine,lose-node,kill-job")) == ["kill-engine", "kill-job"]
    assert "not drawn: cut-link, sever-link, lose-node: only root may make hosts" in capsys.readouterr().out


def test_only_a_soak_on_several_hosts_asks_whether_they_can_be_had(able: pytest.MonkeyPatch) -> None:
    able.setattr(soak_plan, "why_no_hosts", lambda: pytest.fail("it has tried to make a host"))
    assert plan(faults="kill-engine") == ["kill-engine"]
    assert plan(fault_seed=next(seed for seed in range(100) if not wants_hosts(seed, None)))


def test_faults_that_cannot_happen_here_are_left_out_and_the_reason_is_printed(
    able: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    able.setattr(soak_plan, "why_no_disk", lambda: "only root may mount")
    able.setattr(soak_plan, "why_no_handles", lambda: "no compiler")
    assert plan(faults="kill-job,fill-disk,fill-checkpoint-disk,exhaust-disk,stale-files") == ["kill-job"]
    told = capsys.readouterr().out
    disks = "fill-checkpoint-disk, fill-disk, exhaust-checkpoint-disk, exhaust-disk"
    assert f"not drawn: {disks}: only root may mount" in told and "not drawn: stale-files: no compiler" in told
    drawn = {name for seed in range(60) for name in plan(fault_seed=seed)}
    assert not drawn & {*disks.split(", "), "stale-files"} and "limit-job" in drawn


def test_a_fault_has_in_both_runs_what_it_needs() -> None:
    """Agent workers, a place for one more replica, checkpoints of their own, functions that take orders."""
    every = [*KINDS.values()]
    config = config_from_tree(run_config(options(), Path("run"), 0.01, every))
    assert config.rollout.agent_workers == 2 and config.rollout.max_replicas == 3
    assert config.checkpoint.dir == Path("run.checkpoints") and config.checkpoint.every == soak.SAVE_EVERY
    assert config.algorithm.loss.endswith("ordered_ppo") and config.agent.loop.endswith("OrderedTurn")
    spoiled = [kind for kind in every if kind.action == "spoil" and kind.ending is None]
    assert config.trainer.max_skipped_steps >= len(spoiled) == 2
    floods = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["flood-agent-worker"]]))
    assert floods.rollout.agent_workers == 2 and floods.agent.loop.endswith("OrderedTurn")
    plain = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["kill-engine"]]))
    assert (plain.rollout.agent_workers, plain.rollout.max_replicas, plain.checkpoint.dir) == (0, None, None)
    assert (plain.algorithm.loss, plain.agent.loop) == ("ppo", "single_turn")


def test_faults_that_must_end_the_run_have_what_they_need() -> None:
    """Disks are mounted by their targets; the loss takes orders, and the reward of evaluations is watched."""
    config = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["spoil-steps"]]))
    assert config.algorithm.loss.endswith("ordered_ppo") and config.trainer.max_skipped_steps == LEAST_SKIPPED
    assert config.evaluation.sets[0].reward.function == "math"
    watched = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["limit-evaluation"]]))
    reward = watched.evaluation.sets[0].reward
    assert reward.function == "benchmarks.soak_reward:watched_math" and reward.kwargs == {"orders": "run.orders"}
    assert watched.algorithm.loss == "ppo"
    apart = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["exhaust-checkpoint-disk"]]))
    assert apart.checkpoint.dir == Path("run.checkpoints")
    held = config_from_tree(run_config(options(), Path("run"), 0.01, [KINDS["abort-job"]]))
    assert held.algorithm.loss.endswith("ordered_ppo")


def test_an_evaluation_that_is_watched_says_so_and_has_the_same_rewards(tmp_path: Path) -> None:
    samples = [RewardInput("What?", rf"\boxed{{{number}}}", answer="7") for number in (7, 8)]
    assert [watched_math(each, str(tmp_path)).score for each in samples] == [1.0, 0.0]
    assert not (tmp_path / EVALUATED).exists()
    give(tmp_path, WATCH_EVALUATION)
    assert [watched_math(each, str(tmp_path)).score for each in samples] == [1.0, 0.0]
    assert (tmp_path / EVALUATED).exists()


def test_a_run_on_several_hosts_has_the_ranks_on_one_and_an_engine_on_each_of_the_others(tmp_path: Path) -> None:
    place = SeveralHosts(Hosts(SeveralHosts.COUNT, tmp_path))
    config = config_from_tree(run_config(options(), Path("run"), 0.0, [KINDS["lose-node"]], place=place.changes(2)))
    pools = resolve_pools(config)
    assert pools.nodes == SeveralHosts.COUNT and config.launch.max_restarts == 2
    assert config.timeouts.rpc_s >= 2 * KINDS["cut-link"].seconds[1] and config.timeouts.node_s == NODE_S
    assert config.admission.mode == "async" and config.trainer.gpus == config.rollout.replicas == 2
    command = place.command(Path("run.yaml"), ranks=2, restarts=2)
    assert command[0].endswith("launch/multinode.sh") and command[1].count(",") == 2 and command[2] == "run.yaml"
    assert place.variables()["MEGARL_RSH"] == str(tmp_path / "rsh")


def test_a_run_that_takes_longer_steps_under_faults_has_other_timeouts_and_the_loss_that_waits() -> None:
    usual = run_config(options(), Path("run"), 0.0)
    changed = run_config(options(), Path("run"), 0.0, tempo=Tempo(rpc_s=7.0, weight_sync_s=9.0, slower=True))
    config = config_from_tree(changed)
    assert (config.timeouts.rpc_s, config.timeouts.weight_sync_s) == (7.0, 9.0)
    assert config.algorithm.loss.endswith("ordered_ppo")
    assert changed | {name: usual.get(name) for name in ("timeouts", "algorithm")} == usual


# --- rewards that are late


def test_the_share_of_late_samples_is_drawn_by_problem_response_and_seed() -> None:
    late = [is_late(f"problem {number}", "x", 0.02, 7) for number in range(20_000)]
    assert 300 < sum(late) < 500
    assert late == [is_late(f"problem {number}", "x", 0.02, 7) for number in range(20_000)]
    assert late != [is_late(f"problem {number}", "x", 0.02, 8) for number in range(20_000)]
    assert not any(is_late(f"problem {number}", "x", 0.0, 7) for number in range(1000))


def test_a_late_reward_is_marked_and_times_out_and_the_others_are_scored(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    kwargs = {"share": 0.5, "seed": 0, "sleep_s": 60.0, "marks": str(marks), "orders": str(tmp_path)}
    answers = [str(number) for number in range(6)]
    late = [answer for answer in answers if is_late("What?", rf"\boxed{{{answer}}}", 0.5, 0)]
    assert 0 < len(late) < 6
    pool = RewardPool(
        [RewardSpec("benchmarks.soak_reward:late_math", kwargs)],
        workers=1, timeout_s=3.0, on_error=0.0, start_timeout_s=120,
    )  # fmt: skip
    try:
        futures = [pool.submit(RewardInput("What?", rf"\boxed{{{each}}}", answer=each)) for each in answers]
        outcomes = [future.result(300) for future in futures]
    finally:
        pool.close()
    assert [outcome.reason for outcome in outcomes] == ["timeout" if each in late else None for each in answers]
    assert [outcome.score for outcome in outcomes] == [float(each not in late) for each in answers]
    assert marked(marks) == len(late)


def test_the_function_can_be_used_as_a_reward(tmp_path: Path) -> None:
    kwargs = {"share": 0.0, "seed": 0, "sleep_s": 60.0, "marks": str(tmp_path / "marks"), "orders": str(tmp_path)}
    assert resolve("benchmarks.soak_reward:late_math", kwargs)(RewardInput("What?", "7", answer="7")).score == 1.0
    assert marked(tmp_path / "marks") == 0 and late_math.warm_up  # type: ignore[attr-defined]


def test_an_answer_is_late_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.soak_reward.time.sleep", slept.append)
    for response in ("7", "7", "8", "7"):
        late_math(RewardInput("What?", response, answer="7"), 1.0, 0, 9.0, str(tmp_path / "marks"), str(tmp_path))
    assert slept == [9.0, 9.0] and marked(tmp_path / "marks") == 2


def _mark(path: Path) -> None:
    from benchmarks.soak_reward import mark

    for _ in range(200):
        mark(path, RewardInput("a problem", "a response"))


def test_marks_of_several_processes_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    processes = [multiprocessing.get_context("fork").Process(target=_mark, args=(path,)) for _ in range(3)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
    assert marked(path) == 600


# --- rows

SCHEDULE = schedule(0, QUICK_FAULTS, replicas=2, first=3, last=20)


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
    ("hang-engine", 2, 1), ("crawl-engine", 2, 1), ("pause-engine", 1, 1), ("drain-replica", 1, 1),
    ("kill-engine-in-sync", 2, 0), ("hang-engine-in-sync", 2, 0), ("kill-engine-in-sync", 3, 1),
    ("kill-controller", 2, 0), ("kill-rank", 2, 0), ("abort-job", 2, 0), ("cut-link", 2, 0), ("lose-node", 1, 0),
])  # fmt: skip
def test_a_fault_of_one_replica_explains_one_and_in_the_middle_of_a_sync_all(
    name: str, restarted: int, unexplained: int
) -> None:
    happened = [event(name, restarted=restarted, continued=3)]
    records = [{"sync/restarted_replicas": float(restarted)}]
    rows = fault_rows(outcome("disturbed", records=records, happened=happened), [happened[0].fault])
    [row] = [each for each in rows if each.name == "replicas restarted without a loss"]
    assert (row.ratio, row.ok) == (unexplained, not unexplained)


@pytest.mark.parametrize("changes", [
    {"late_rewards": 5, "happened": [*hit(), event("hang-reward")]},
    {"late_rewards": 3, "happened": [*hit(), event("kill-reward")]},
    {"late_rewards": 9, "happened": [*hit(), event("kill-rank")]},
    {"late_rewards": 9, "happened": [*hit(), event("kill-agent-worker")]},
    {"report": AccountingReport(skipped=1), "happened": [*hit(), event("spoil-logprob")]},
    {"report": AccountingReport(skipped=2), "happened": [*hit(), event("spoil-steps", spoiled=7)]},
    {"records": [{"reward/errors": 4.0}], "rolled_back": [{"sync/restarted_replicas": 1.0}]},
    {"records": [{"reward/errors": 4.0}], "happened": [event("kill-rank")]},
    {"records": [{"reward/errors": 4.0, "sync/restarted_replicas": 1.0}],
     "happened": [event("kill-rank", restarted=1)]},
])  # fmt: skip
def test_what_a_restart_or_a_reward_worker_costs_is_allowed(changes: dict[str, Any]) -> None:
    names = missed(outcome("undisturbed"), outcome("disturbed", **changes))
    assert [name for name in names if not name.startswith("faults survived")] == []


def test_a_problem_of_the_accounting_is_in_the_row_of_its_check() -> None:
    report = AccountingReport()
    report.expect("epochs", "prompts", 2, 1)
    rows = rows_of(outcome("undisturbed"), outcome("disturbed", report=report), SCHEDULE, 10.0, 20.0)
    (row,) = [each for each in rows if not each.ok]
    assert row.name == "disturbed: epochs, problems" and row.details == {"1": "prompts: 2, but 1"}


def test_no_run_is_started_without_time_for_it(tmp_path: Path) -> None:
    ended = run_once("disturbed", options(minutes=20.0), tmp_path, time.monotonic() + 1.0, SCHEDULE, 0.0, [])
    assert ended.failure == "less than 30 s were left of --minutes 20" and not list(tmp_path.iterdir())


def test_too_much_time_is_missed() -> None:
    assert missed(outcome("undisturbed"), outcome("disturbed"), minutes=21.0) == ["minutes / limit"]


def test_a_fault_that_is_not_over_is_told() -> None:
    faults = [Fault(KINDS["kill-engine"], 0, 3, 0.0, 0.0)]
    happened = [Happened(faults[0], pid=5, step=4, at_s=9.0, notes=["it was idle", "not replaced"])]
    row = fault_rows(outcome("disturbed", happened=happened), faults)[0]
    assert not row.ok and "NOT OVER" in row.details["1"]
    assert row.details["not happened, or not over"] == "kill-engine"


def test_what_comes_before_the_next_fault_is_an_effect_of_the_fault_before() -> None:
    happened = [Happened(fault, pid=1, step=step, at_s=0.0) for fault, step in zip(SCHEDULE, (1, 3), strict=True)]
    records = [
        {"rollout/continued": float(number), "sync/restarted_replicas": number % 2} for number in (101, 11, 20, 3, 5)
    ]
    note_effects(outcome("disturbed", records=records, happened=happened))
    assert [(each.continued, each.restarted, each.notes) for each in happened] == [
        (31, 1, ["31 responses continued elsewhere"]), (8, 2, ["8 responses continued elsewhere"]),
    ]  # fmt: skip


def test_what_a_resumed_run_restarts_is_an_effect_of_the_fault_that_it_was_resumed_after() -> None:
    """The publication at the start of a resumed run is in the record of its first step, which is made again."""
    happened = [event("kill-engine-idle", restarted=1), event("kill-rank", redone_steps=2)]
    records = [{"sync/restarted_replicas": number} for number in (0.0, 0.0, 2.0, 0.0, 0.0)]
    disturbed = outcome("disturbed", records=records, happened=happened)
    note_effects(disturbed)
    assert [each.restarted for each in happened] == [1, 2]
    assert "replicas restarted without a loss" not in missed(outcome("undisturbed"), disturbed)


def test_a_run_whose_faults_went_wrong_has_failed_and_is_counted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    class Broken:
        happened = hit()
        engine_start_s = None
        ends = JobEnds()

        def __init__(self, *_: Any, slower: bool, replicas: int, **__: Any) -> None:
            given.update(slower=slower, replicas=replicas)

        def stop(self) -> str:
            return "the faults: AccessDenied"

    def run_job(config: Any, **_: Any) -> list[dict[str, Any]]:
        given.update(config["timeouts"])
        Path(config["run"]["dir"]).mkdir()
        (Path(config["run"]["dir"]) / "summary.json").write_text("{}")
        return [{"time/step": 1.0}]

    report = AccountingReport(steps=1)
    for name, fake in (("Injector", Broken), ("run_job", run_job), ("check_run", lambda run_dir: report)):
        monkeypatch.setattr(soak, name, fake)
    monkeypatch.setattr(soak, "start_seconds", lambda run_dir, pid, since: 12.5)
    chosen, until = options(minutes=20.0, replicas=1), time.monotonic() + 600.0
    ended = run_once("disturbed", chosen, tmp_path, until, SCHEDULE, 0.0, [], Tempo(3.0, 5.0, slower=True))
    assert given["slower"] and given["replicas"] == 1 and (given["rpc_s"], given["weight_sync_s"]) == (3.0, 5.0)
    assert ended.happened and {each.start_s for each in ended.happened} == {12.5}
    assert ended.failure == "the faults: AccessDenied" and ended.report is report and len(ended.records) == 1


def test_help_names_every_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["soak.py", "--help"])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert all(
        name in text
        for name in ("--minutes", "--seed", "--json", "--quick", "--keep", "--faults", "kill-job", "limit-job")
    )
