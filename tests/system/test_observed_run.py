"""A whole run that is watched from outside while it lives: scraped, shown by `megarl top`, its sockets listed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megarl.telemetry.sinks.prometheus import read_endpoint
from megarl.telemetry.sinks.prometheus_names import all_names
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.checkout import ROOT, environment
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import popen, step_records, tiny_config
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

STEPS = 400  # more than it does until it is asked to stop


def scraped(run_dir: Path) -> dict[str, float]:
    """The metrics without labels alongside `run`, as Prometheus would read them."""
    endpoint = read_endpoint(run_dir)
    assert endpoint is not None
    token = Path(endpoint.token_file).read_text().strip()
    request = urllib.request.Request(endpoint.url, headers={"Authorization": f"Bearer {token}"})
    text = urllib.request.urlopen(request, timeout=20).read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name for sample in samples} <= all_names().keys()
    return {sample.name: sample.value for sample in samples if set(sample.labels) == {"run"}}


def megarl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=120, check=False
    )


@contextmanager
def running(config: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    path = Path(config["run"]["dir"]).parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    process = popen([sys.executable, "-m", "megarl", "train", "--config", str(path)], config["run"]["dir"])
    try:
        yield process
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.slow
def test_a_living_run_is_scraped_shown_and_its_endpoint_is_known_and_ends_with_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tiny_config(tmp_path, steps=STEPS)
    config["trainer"]["gpus"] = 1
    config["telemetry"] = {"prometheus_port": port}
    run_dir = Path(config["run"]["dir"])
    with running(config) as process:
        wait_until(lambda: len(step_records(run_dir)) >= 3 or process.poll() is not None, 400, "three steps")
        assert process.poll() is None, process.communicate()[0][-4000:]
        values = scraped(run_dir)
        record = next(each for each in step_records(run_dir) if each["step"] == values["megarl_steps_done"])
        assert values["megarl_steps_planned"] == STEPS
        assert values["megarl_reward_mean"] == record["reward/mean"]
        assert values["megarl_time_step_seconds"] == record["time/step"]

        check_on_loopback(run_dir, "train_rl.py")

        shown = megarl("top", str(run_dir))
        assert shown.returncode == 0 and "tiny  running" in shown.stdout and f"/{STEPS}" in shown.stdout, shown.stdout

        steps = len(step_records(run_dir))
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        output, _ = process.communicate(timeout=300)
        assert process.returncode != 0 and "Traceback" not in output, output[-4000:]
    check_saved(run_dir, output, steps)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert read_endpoint(run_dir) is None
    ended = megarl("top", str(run_dir), "--once").stdout
    assert "tiny  preempted  SIGINT" in ended
    check_report(run_dir)
    check_trace(run_dir)
    assert_nothing_left(run_dir)


def check_report(run_dir: Path) -> None:
    """The page has the rewards of the run's own metrics, and samples."""
    made = megarl("report", str(run_dir))
    assert made.returncode == 0, made.stderr
    page = (run_dir / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    records = step_records(run_dir)
    (reward,) = [figure for figure in data["figures"] if figure["key"] == "reward"]
    assert len(records) < 800, "else a point is the mean of several steps"
    assert data["axes"][0]["step"] == [record["step"] for record in records]
    assert reward["lines"][0]["y"] == pytest.approx([record["reward/mean"] for record in records], abs=1e-3)
    assert "preempted" in page and "SIGINT" in page and "<details open><summary>" in page


def check_trace(run_dir: Path) -> None:
    """The trace has each step once, and spans of every part of the run."""
    made = megarl("trace", str(run_dir), "--out", str(run_dir / "trace.json"))
    assert made.returncode == 0, made.stderr
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names["step"] == len(step_records(run_dir)), names
    assert {"update", "sync", "save"} <= names.keys(), names
    assert names["turn"] >= sum(record["batch/samples"] for record in step_records(run_dir)), names
    assert any(name.startswith("trajectory ") for name in names), names
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(processes) >= 3, processes  # a trainer rank, the controller and an engine


def check_saved(run_dir: Path, output: str, steps: int) -> None:
    """One Ctrl-C has ended the step and saved it."""
    assert output.count("megarl: finishing the step, saving; again to abort") == 1, output[-3000:]
    record = json.loads((run_dir / "exit.json").read_text())
    assert record["status"] == "preempted" and record["step"] >= steps
    assert (run_dir / "checkpoints" / f"iter_{record['step']:07d}" / "manifest.json").is_file()
    assert not (run_dir / "claim.json").exists()


def test_a_port_that_is_taken_is_one_message_before_anything_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config["trainer"]["gpus"] = 1
    run_dir = Path(config["run"]["dir"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config["telemetry"] = {"prometheus_port": taken.getsockname()[1]}
        with running(config) as process:
            output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    (message,) = [line for line in output.splitlines() if line.startswith("megarl: ")]
    assert "telemetry.prometheus_port" in message and "choose another port" in message
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "supervisor.json").exists()
