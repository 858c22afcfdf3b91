"""The pool of a training run is changed by `megarl pool` while the run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, step_records
from tests.support.runs.whole_runs import (
    check_every_group_once,
    config_of,
    killed_after,
    metric_steps,
    start_run,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_engines_are_added_drained_and_removed_while_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with one engine, has two, and ends with another one. All groups are trained, each once."""
    config = config_of(tmp_path, steps=100_000, rollout={"max_replicas": 2}, checkpoint={"every": 1000})
    config["run"]["deterministic"], config["evaluation"], config["admission"] = False, {}, {"mode": "async"}
    config["sampling"]["max_tokens"], config["rollout"]["report_interval_s"] = 48, 0.5
    run_dir, process = tmp_path / "run", start_run(config)

    def pool(*arguments: str) -> tuple[int, str]:
        """The exit status and the output of `megarl pool`."""
        capsys.readouterr()
        status = main.main(["pool", arguments[0], str(run_dir), *arguments[1:]])
        reported = capsys.readouterr()
        return status, reported.out if status == 0 else reported.err.splitlines()[-1]

    def replicas() -> dict[int, dict[str, Any]]:
        status, text = pool("list", "--json")
        assert status == 0, text
        return {each["replica"]: each for each in json.loads(text)["replicas"]}

    def goes_on(steps: int = 2) -> None:
        done = metric_steps(run_dir)
        wait_for(lambda: metric_steps(run_dir) >= done + steps, process)

    with killed_after(process, run_dir):
        wait_for(lambda: metric_steps(run_dir) >= 1, process)
        assert {index: each["state"] for index, each in replicas().items()} == {0: "serving"}
        status, reported = pool("remove", "0")
        assert status == 2 and "replica 0 cannot be removed: no other replica serves training now" in reported
        assert pool("add") == (0, "replica 1 joins the pool with the next publication of the weights\n")
        wait_for(lambda: replicas()[1]["state"] == "serving", process)
        goes_on()
        both = replicas()
        assert int(both[1]["version"]) >= 1 and both[1]["host"]
        status, reported = pool("add")
        assert status == 2 and "cannot add 1 engine: Ray has room for 0" in reported
        status, reported = pool("drain", "0")
        assert status == 0 and "replica 0 is drained" in reported
        goes_on()
        old = replicas()[0]
        assert (old["state"], old["running"], old["waiting"]) == ("drained", 0, 0)
        assert int(old["version"]) > int(both[0]["version"]), "a drained replica takes part in publications"
        assert pool("remove", "0")[0] == 0
        goes_on()
        assert list(replicas()) == [1]
        assert pool("add") == (0, "replica 2 joins the pool with the next publication of the weights\n")
        wait_for(lambda: replicas()[2]["state"] == "serving", process)
        assert pool("remove", "1")[0] == 0
        goes_on()
        assert list(replicas()) == [2]
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=600)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    check_every_group_once(run, metric_steps(run_dir))
    records = step_records(run_dir)
    assert max(record["rollout/replicas_alive"] for record in records) == 2
    assert sum(record.get("sync/restarted_replicas", 0) for record in records) == 0
    assert all(record["rollout/replicas_lost"] == 0 for record in records)
    status, reported = pool("list")
    assert status == 2 and f"no run lives in {run_dir}: its supervisor" in reported
    assert_nothing_left(run_dir)
