"""The job that all cluster tests run: two trainer hosts with a rank each, two rollout hosts with an engine each."""

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lib.accounting import check_run
from tests.support.checkout import ROOT, environment
from tests.support.runs.hosts import Hosts
from tests.support.runs.run import step_records, tiny_config
from tests.support.trainer.configs import with_sections

FOUR_HOSTS: dict[str, dict[str, Any]] = {
    "trainer": {"gpus_per_node": 1},
    "rollout": {"replicas": 2, "gpus_per_node": 1, "max_model_len": 64},
}

TWO_HOSTS: dict[str, dict[str, Any]] = {
    "trainer": {"gpus": 1, "gpus_per_node": 1},
    "rollout": {"replicas": 1, "gpus_per_node": 1, "max_model_len": 64},
}


def write_job(directory: Path, steps: int, **sections: dict[str, Any]) -> Path:
    """A config of `steps` steps in `directory`, its run directory alongside it; `sections` update whole sections.

    Its batches are kept, so that its groups can be counted again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(directory, steps=steps)
    config["evaluation"] = {}
    config["telemetry"] = {"dump_batches": True}
    config["timeouts"] |= {"node_s": 90, "engine_start_s": 720, "generate_s": 300, "save_s": 60}
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(with_sections(config, sections)))
    return path


def start_job(hosts: Hosts, config: Path, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
    """launch/multinode.sh over the hosts, and the log of all that it says."""
    log = config.with_name("job.log")
    command = ["launch/multinode.sh", ",".join(hosts.addresses), str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(MEGARL_RSH=str(hosts.rsh), **variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return process, log


def exit_record(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "exit.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str, log: Path | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        said = log.read_text()[-4000:] if log is not None and log.exists() else ""
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}\n{said}"
        time.sleep(0.3)


def some_steps(
    rng: random.Random, run_dir: Path, process: subprocess.Popen[bytes], log: Path, timeout_s: float
) -> None:
    """Wait for a moment that `rng` draws: some steps more than there are, and a part of the next one."""
    least = len(step_records(run_dir)) + rng.randint(3, 8)
    wait_for(lambda: len(step_records(run_dir)) >= least or process.poll() is not None, timeout_s, "some steps", log)
    time.sleep(rng.uniform(0.0, 3.0))
    assert process.poll() is None, log.read_text()[-4000:]


def check_groups(run_dir: Path) -> None:
    """The soak's independent script finds nothing wrong in the files of a job that has ended, maybe before its end.

    Nothing was trained twice, no group is lost, and all counters agree.
    """
    report = check_run(run_dir, stopped=True)
    print(*report.lines(), sep="\n")
    assert report.ok, "\n".join(report.lines())
    assert report.ends["trained"], "nothing was trained, so nothing could be trained twice"


def check_steps(run_dir: Path, steps: int | None = None) -> None:
    """Every step once and in order, its groups accounted for, engines and trainer of one opinion.

    Without `steps` the run may go on: what it has written by now is read once.
    """
    records = step_records(run_dir)
    assert [record["step"] for record in records] == list(range(1, (len(records) if steps is None else steps) + 1))
    for record in records:
        assert record["groups/admitted"] == record["groups/trained"] + record["groups/filtered"] == 4
        if record["groups/trained"]:  # a long run's model gives the same answer to everything: nothing to train on
            assert record["mismatch/logprob_abs_diff_max"] <= 1e-4
