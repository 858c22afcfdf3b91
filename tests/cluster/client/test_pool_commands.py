"""`megarl pool`: which runs it asks, where, and what it makes of the controller's answers."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.cli import main
from megarl.cluster.client import pool_commands
from megarl.cluster.client.pool_commands import ask_pool
from megarl.cluster.pool.pool_process import SPEC_FILE, SupervisorHandle, SupervisorSpec
from megarl.common.errors import ConfigError, PartsLost, RolloutError
from megarl.common.process.processes import ProcessId
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.rollout.fleet.elastic_pool import ReplicaReport
from megarl.rollout.orchestrator.controller import RolloutController
from megarl.rollout.orchestrator.pool_controller import ServingController
from tests.support.trainer.configs import config

REPORT = ReplicaReport(0, "node-a", "serving", ("GPU-1", "GPU-2"), "7", 12, 3)


@pytest.mark.parametrize("controller", [RolloutController, ServingController])
def test_each_controller_has_what_the_commands_call(controller: type) -> None:
    assert not [name for name in ("answer", "list_replicas", "change_pool") if not hasattr(controller, name)]


def write_state(run_dir: Path, process: ProcessId | None = None, **changes: object) -> Path:
    """A run directory as a supervisor that is ready leaves it; return it."""
    state = {
        "state": "ready", "error": None, "launch_id": "5f3a", "host": platform.node(), "address": "10.0.0.7:6379",
        "namespace": "megarl-5f3a", "partition": "run", "attempt": 0, "process": asdict(process or ProcessId.own()),
        **changes,
    }  # fmt: skip
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "supervisor.json").write_text(json.dumps(state))
    text = config("model").model_dump_json()
    SupervisorSpec(text, str(run_dir), ProcessId.own(), "5f3a", 0, "/", cuda=False).save(run_dir / "logs" / SPEC_FILE)
    return run_dir


class Controller:
    """Answers by the name and the arguments of a call, in the place of the run's Ray."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.connected: list[SupervisorHandle] = []
        self.fails: Exception | None = None

    def connect(self, handle: SupervisorHandle, timeout_s: float) -> None:
        assert os.environ[NODE_ADDRESS_VARIABLE] == "10.0.0.7"
        self.connected.append(handle)

    def call(self, actor: object, method: str, args: tuple[object, ...], kwargs: object, **bounds: Any) -> object:
        assert actor is self and bounds["timeout_s"] > 0
        self.asked.append((method, *args))
        if self.fails is not None:
            raise self.fails
        return ([REPORT], 1) if method == "list_replicas" else " ".join(map(str, args))


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "")  # restored after the test
    monkeypatch.setattr(pool_commands, "connect_ray", made.connect)
    monkeypatch.setattr(pool_commands, "call_once", made.call)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: made)
    monkeypatch.setattr(ray, "shutdown", made.connected.clear)
    return made


def test_every_host_of_the_run_can_ask(tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """There Ray listens at the host's address on the way to the head."""
    monkeypatch.setattr(pool_commands, "own_address", lambda hosts, interface: {"10.0.0.1": "10.0.0.7"}[hosts[0]])
    run_dir = write_state(tmp_path, host="node-1", address="10.0.0.1:6379")
    assert ask_pool(run_dir, "drain", 1, say=said) == "drain 1"


def said(text: str) -> None:
    assert text.startswith("waiting up to") and "the rollout controller of" in text


def test_the_controller_is_called_and_its_answer_returned(tmp_path: Path, controller: Controller) -> None:
    run_dir = write_state(tmp_path)
    assert ask_pool(run_dir, "drain", 1, say=said) == "drain 1"
    assert ask_pool(run_dir, "add", 2, say=said) == "add 2"
    listed = ask_pool(run_dir, "list", say=said)
    assert listed == {"replicas": [asdict(REPORT)], "missing": 1}
    assert controller.asked == [("change_pool", "drain", 1), ("change_pool", "add", 2), ("list_replicas",)]
    assert controller.connected == [], "the connection is not closed"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (RolloutError("there is no replica 9; the replicas are 0, 1"), "there is no replica 9; the replicas are 0, 1"),
        (PartsLost("the rollout controller and its queue have ended"), "the rollout controller and its queue have"),
        (ray.exceptions.ActorDiedError(), "The actor died"),
        (ray.exceptions.GetTimeoutError("late"), "waited 5 s for the rollout controller of .*: `megarl pool list`"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    tmp_path: Path, controller: Controller, fails: Exception, message: str
) -> None:
    controller.fails = fails
    with pytest.raises(ConfigError, match=message):
        ask_pool(write_state(tmp_path), "remove", 9, timeout_s=5, say=said)
    assert controller.connected == [], "the connection is not closed"


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (PermissionError(13, "Permission denied", "ray_token"), "cannot be reached: .*run it as the user of the run"),
        (RolloutError("process 1 could not connect to Ray"), "could not connect to Ray; run the command on a host of"),
    ],
)
def test_a_ray_that_cannot_be_reached_is_reported(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch, fails: Exception, message: str
) -> None:
    def connect(handle: SupervisorHandle, timeout_s: float) -> None:
        raise fails

    monkeypatch.setattr(pool_commands, "connect_ray", connect)
    with pytest.raises(ConfigError, match=message):
        ask_pool(write_state(tmp_path), "list", say=said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process": ProcessId(1, -1)}, r"no run lives in .*: its supervisor \(pid 1\) has ended"),
        ({"state": "starting"}, "engines of .* are still being started"),
        ({"state": "rebuilding"}, "is restarting: try again in a minute"),
        ({"state": "stopped", "error": "asked to"}, "no run lives in .*: its pool is stopped: asked to"),
        ({"state": "failed", "host": "elsewhere"}, "no run lives in .*: its pool is failed"),
        ({"host": "node-7", "address": "127.0.0.1:6379"}, "run the command on node-7, the only host of the run"),
    ],
)
def test_a_run_that_cannot_be_asked_here_is_reported_at_once(
    tmp_path: Path, controller: Controller, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ask_pool(write_state(tmp_path, **changes), "list", say=said)
    assert not controller.asked


def test_the_command_line_reports_mistakes_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["pool", "list", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megarl: ") and "no run has started there" in error and error.count("\n") == 1


def test_the_list_is_a_table_or_json(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_state(tmp_path)
    assert main.main(["pool", "list", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"][0]["version"] == "7"
    assert main.main(["pool", "list", str(run_dir)]) == 0
    assert main.main(["pool", "drain", str(run_dir), "1", "--undo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "replica  node    state    devices       version  running  waiting",
        "0        node-a  serving  GPU-1, GPU-2  7        12       3",
        "1 more were lost with their node and restart when there is room",
        "undrain 1",
    ]
