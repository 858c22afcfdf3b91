"""The monitor in whole runs: a replica with wrong weights is named, taken out and replaced; an alarm stops a run,
skips a batch or has the weights published."""

import json
from pathlib import Path

import pytest

from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import tiny_config, train
from tests.support.runs.whole_runs import check_every_group_once

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_replica_with_wrong_weights_is_named_within_one_step_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two serves wrong weights under the name of version 2, with which the third step is generated."""
    monkeypatch.setenv("MEGARL_TEST_WRONG_WEIGHTS", str(tmp_path / "happened"))
    config = tiny_config(tmp_path, steps=5)
    config["run"]["deterministic"], config["evaluation"] = True, {}  # two groups of each step for each replica
    config["telemetry"], config["monitor"] = {"dump_batches": True}, {"min_tokens": 40}
    config["rollout"] |= {
        "replicas": 2,
        "engine_kwargs": {"worker_extension_cls": "tests.support.engines.wrong_weights.LoadsWrongWeights"},
    }
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    assert (tmp_path / "happened").exists()
    steps = run.metrics
    assert [step["monitor/quarantined"] for step in steps] == [0, 0, 1, 0, 0]
    gaps = {each: [step.get(f"mismatch/replica/{each}/logprob_abs_diff") for step in steps] for each in (0, 1)}
    print(f"mean |engine - trainer| of each replica: {gaps}")
    assert max(gap for gap in gaps[0] if gap is not None) < 1e-3 < 0.12 < gaps[1][2]
    assert all(gap is None or gap < 1e-3 for gap in gaps[1][:2] + gaps[1][3:]), "its successor has the right weights"
    reported = [line for line in run.output.splitlines() if "replica_gap" in line]
    assert len(reported) == 1 and "alarm replica_gap of replica 1: " in reported[0]
    assert reported[0].endswith("replica 1 is quarantined until the next publication has replaced it")
    assert [step["sync/restarted_replicas"] for step in steps] == [0, 0, 1, 0, 0]
    check_every_group_once(run, steps=5)
    assert_nothing_left(run.directory)


def test_an_alarm_that_stops_the_run_saves_first_and_is_no_quiet_success(tmp_path: Path) -> None:
    """The second step of a policy that gets no signal: the first one is saved, and the batch is kept."""
    config = tiny_config(tmp_path, steps=5)
    config["evaluation"], config["checkpoint"] = {}, {"every": 1000}
    config["monitor"] = {"rules": {"truncated": {"threshold": 0.01, "patience": 2, "action": "stop"}}}
    config["sampling"]["max_tokens"] = 6  # of random tokens, hardly one in a hundred ends a response
    run = train(config)
    assert run.code != 0 and len(run.metrics) == 1
    record = json.loads((run.directory / "exit.json").read_text())
    assert record["status"] == "failed" and "alarm truncated: " in record["reason"]
    assert "alarm truncated: " in run.output and "docs/observability/monitor.md#truncated" in run.output
    assert (run.directory / "checkpoints" / "iter_0000001").is_dir()
    assert list((run.directory / "failed_batch").glob("step_000001.*"))
    assert_nothing_left(run.directory)


def test_an_alarm_that_skips_leaves_the_weights_alone_and_both_sides_count_the_groups_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only engine serves wrong weights for the third step, and right ones from the next publication on."""
    monkeypatch.setenv("MEGARL_TEST_WRONG_WEIGHTS", str(tmp_path / "happened"))
    monkeypatch.setenv("MEGARL_TEST_WRONG_REPLICA", "0")
    config = tiny_config(tmp_path, steps=5)
    config["evaluation"], config["telemetry"] = {}, {"dump_batches": True}
    config["monitor"] = {
        "min_tokens": 40, "rules": {"logprob_gap": {"threshold": 0.05, "patience": 1, "action": "skip"}},
    }  # fmt: skip
    config["rollout"]["engine_kwargs"] = {
        "worker_extension_cls": "tests.support.engines.wrong_weights.LoadsWrongWeights"
    }
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    assert (tmp_path / "happened").exists()
    steps = run.metrics
    assert [step["monitor/skipped"] for step in steps] == [0, 0, 1, 0, 0]
    assert [step.get("policy/updates", 0) for step in steps] == [1, 1, 0, 1, 1]
    assert [step["groups/failed"] for step in steps] == [0, 0, 4, 0, 0]
    assert [step["groups/trained"] + step["groups/filtered"] for step in steps] == [4, 4, 0, 4, 4]
    last = steps[-1]
    assert (last["total/groups_failed"], last["total/groups_admitted"]) == (4, 20)
    assert last["total/groups_trained"] + last["total/groups_filtered"] == 16
    reported = [line for line in run.output.splitlines() if "alarm logprob_gap: " in line]
    assert len(reported) == 1 and reported[0].endswith("the step is skipped (1 of at most 5)")
    assert list((run.directory / "failed_batch").glob("step_000002.*"))
    assert_nothing_left(run.directory)


def test_an_alarm_that_syncs_publishes_before_the_interval_has_passed(tmp_path: Path) -> None:
    """Responses are cut from the first step on, and the alarm begins with the second one."""
    config = tiny_config(tmp_path, steps=6)
    config["evaluation"], config["telemetry"] = {}, {"dump_batches": True}
    config["admission"] = {"mode": "async", "sync_interval": 4, "max_staleness": 4}
    config["monitor"] = {"rules": {"truncated": {"threshold": 0.01, "patience": 2, "action": "sync"}}}
    config["sampling"]["max_tokens"] = 6  # of random tokens, hardly one in a hundred ends a response
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    steps = run.metrics
    assert [step["monitor/forced_syncs"] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert [step.get("sync/version") for step in steps] == [None, 2, 3, 4, 5, 6]
    assert "alarm truncated: " in run.output and "the weights are published at once" in run.output
    assert_nothing_left(run.directory)
