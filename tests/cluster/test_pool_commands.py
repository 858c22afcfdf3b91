"""Commands to the pool as files: who may give them, what is refused, and how long the command line waits."""

from __future__ import annotations

import errno
import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tests.support.ray_token  # noqa: F401  # isort: skip  # before Ray is imported
import ray

from megarl.cluster.handle import SPEC_FILE, SupervisorSpec
from megarl.cluster.pool_commands import DIRECTORY, LARGEST_BYTES, PoolCommands, ask_pool, read_command
from megarl.commands import cli
from megarl.commands.pool import render
from megarl.common.errors import ConfigError, RolloutError
from megarl.common.processes import ProcessId
from megarl.rollout.elastic_pool import ReplicaReport
from tests.support.configs import config

LAUNCH = "5f3a"
REPORT = ReplicaReport(0, "node-a", "serving", ("GPU-1", "GPU-2"), "7", 12, 3)


class Controller:
    """Answers each call at once, by its name and arguments, as Ray's handle of the real one does."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        controller = self

        class Call:
            @staticmethod
            def remote(*arguments: object) -> tuple[object, ...]:
                controller.asked.append((name, *arguments))
                return (name, *arguments)

        return Call


def result_of(reference: tuple[str, int], timeout: float) -> object:
    name, *arguments = reference
    if name == "list_replicas":
        return [REPORT], 1
    if arguments == [9]:
        raise RolloutError("there is no replica 9; there are 0, 1")
    return f"{name} {arguments[0]}"


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    monkeypatch.setattr(ray, "wait", lambda references, num_returns, timeout: (references, []))
    monkeypatch.setattr(ray, "get", result_of)
    return Controller()


def write_state(run_dir: Path, process: ProcessId | None = None, **changes: object) -> Path:
    """A run directory as a supervisor that is ready leaves it; return it."""
    state = {
        "state": "ready", "error": None, "launch_id": LAUNCH, "host": platform.node(),
        "process": asdict(process or ProcessId.own()), **changes,
    }  # fmt: skip
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / "supervisor.json").write_text(json.dumps(state))
    text = config("model").model_dump_json()
    SupervisorSpec(text, str(run_dir), ProcessId.own(), LAUNCH, 0, "/", cuda=False).save(run_dir / "logs" / SPEC_FILE)
    return run_dir


@contextmanager
def served(run_dir: Path, controller: Controller) -> Iterator[PoolCommands]:
    """A supervisor that looks for commands, in a thread."""
    commands, ended = PoolCommands(run_dir, LAUNCH), threading.Event()
    commands.look(controller)  # type: ignore[arg-type]

    def look() -> None:
        while not ended.wait(0.01):
            commands.look(controller)  # type: ignore[arg-type]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield commands
    finally:
        ended.set()
        thread.join(10)


def said(text: str) -> None:
    assert "waiting up to" in text and f"pid {os.getpid()}" in text


def test_a_file_system_that_fails_for_a_moment_costs_no_answer(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, real, failures = write_state(tmp_path), Path.read_text, {"supervisor.json": 2, ".answer": 2}

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        kind = path.suffix if path.suffix == ".answer" else path.name
        if failures.get(kind) and path.exists():
            failures[kind] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *arguments, **options)

    with served(run_dir, controller):
        monkeypatch.setattr(Path, "read_text", read)
        assert ask_pool(run_dir, "drain", 1, say=said) == "drain_replica 1"
    assert not any(failures.values())


def test_a_command_is_done_once_and_answered(tmp_path: Path, controller: Controller) -> None:
    run_dir = write_state(tmp_path)
    with served(run_dir, controller):
        assert ask_pool(run_dir, "drain", 1, say=said) == "drain_replica 1"
        assert ask_pool(run_dir, "add", 2, say=said) == "add_replicas 2"
        listed = ask_pool(run_dir, "list", say=said)
        with pytest.raises(ConfigError, match="there is no replica 9; there are 0, 1"):
            ask_pool(run_dir, "remove", 9, say=said)
    assert controller.asked == [("drain_replica", 1), ("add_replicas", 2), ("list_replicas",), ("remove_replica", 9)]
    assert listed == {"replicas": [{**asdict(REPORT), "devices": ["GPU-1", "GPU-2"]}], "missing": 1}
    assert list((run_dir / DIRECTORY).iterdir()) == []
    assert (run_dir / DIRECTORY).stat().st_mode & 0o777 == 0o700


def test_what_is_left_of_an_earlier_launch_is_never_done(tmp_path: Path, controller: Controller) -> None:
    directory = write_state(tmp_path) / DIRECTORY
    directory.mkdir()
    name = "0" * 32
    command = {"launch_id": LAUNCH, "action": "remove", "number": 0}
    (directory / f"{name}.command").write_text(json.dumps(command))
    commands = PoolCommands(tmp_path, LAUNCH)
    commands.look(controller)  # type: ignore[arg-type]
    assert list(directory.iterdir()) == []
    (directory / f"{name}.command").write_text(json.dumps({**command, "launch_id": "another"}))
    commands.look(controller)  # type: ignore[arg-type]
    assert "for launch another" in json.loads((directory / f"{name}.answer").read_text())["error"]
    assert controller.asked == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"launch_id": "5f3a", "action": "shutdown", "number": 0}', "not a command"),
        ('{"launch_id": "5f3a", "action": "remove", "number": "0"}', "not a command"),
        ('{"launch_id": "5f3a", "action": "remove"}', "not a command"),
        ('{"launch_id": "5f3a", "action": "remove", "number": 0, "then": "x"}', "not a command"),
        ("not JSON", "not a command"),
        (" " * (LARGEST_BYTES + 1), f"more than {LARGEST_BYTES} bytes"),
    ],
)
def test_anything_else_is_refused_and_answered(tmp_path: Path, controller: Controller, content: str, told: str) -> None:
    commands = PoolCommands(tmp_path, LAUNCH)
    commands.look(controller)  # type: ignore[arg-type]
    directory = tmp_path / DIRECTORY
    (directory / f"{'a' * 32}.command").write_text(content)
    (directory / "notes.txt").write_text("not a command")
    commands.look(controller)  # type: ignore[arg-type]
    assert told in json.loads((directory / f"{'a' * 32}.answer").read_text())["error"]
    assert controller.asked == [] and not list(directory.glob("*.command"))


@pytest.mark.parametrize("kind", ["link", "pipe", "writable by others"])
def test_a_file_that_another_user_may_have_written_is_not_read(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "x.command", tmp_path / "other"
    other.write_text(json.dumps({"launch_id": LAUNCH, "action": "remove", "number": 0}))
    if kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        other.rename(path)
        path.chmod(0o622)
    with pytest.raises((ValueError, OSError), match=r"symbolic link|only the user of the run can write"):
        read_command(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"process": ProcessId(1, -1)}, r"no run lives in .*: its supervisor \(pid 1\) has ended"),
        ({"state": "starting"}, "engines of .* are still being started"),
        ({"state": "stopped", "error": "asked to"}, "no run lives in .*: its pool is stopped: asked to"),
        ({"state": "failed", "host": "elsewhere"}, "no run lives in .*: its pool is failed"),
    ],
)
def test_a_run_that_does_not_live_is_told_at_once(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    run_dir = write_state(tmp_path, **changes)
    with pytest.raises(ConfigError, match=told):
        ask_pool(run_dir, "list", say=said)
    assert not (run_dir / DIRECTORY).exists()


def test_a_run_that_ends_while_it_is_asked_is_told(tmp_path: Path) -> None:
    run_dir = write_state(tmp_path)
    (run_dir / DIRECTORY).mkdir()
    with pytest.raises(ConfigError, match="its pool is stopping: another reason"):
        ask_pool(run_dir, "list", say=lambda text: write_state(run_dir, state="stopping", error="another reason"))
    assert list((run_dir / DIRECTORY).iterdir()) == []


def test_a_silent_supervisor_is_named_and_its_command_withdrawn(tmp_path: Path) -> None:
    run_dir = write_state(tmp_path)
    (run_dir / DIRECTORY).mkdir()
    named = rf"waited 0 s for the supervisor of .*pid {os.getpid()} on .* to add, which has not read the command"
    with pytest.raises(ConfigError, match=named):
        ask_pool(run_dir, "add", 1, timeout_s=0.01, say=said)
    assert list((run_dir / DIRECTORY).iterdir()) == []


def test_the_command_line_reports_mistakes_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pool", "list", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megarl: ") and "no run has started there" in error and error.count("\n") == 1


def test_the_list_is_a_table_or_json(
    tmp_path: Path, controller: Controller, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_state(tmp_path)
    with served(run_dir, controller):
        assert cli.main(["pool", "list", str(run_dir), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["replicas"][0]["version"] == "7"
        assert cli.main(["pool", "list", str(run_dir)]) == 0
        assert cli.main(["pool", "drain", str(run_dir), "1", "--undo"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "replica  node    state    devices       version  running  waiting",
        "0        node-a  serving  GPU-1, GPU-2  7        12       3",
        "1 more were lost with their node; they are started again when there is room for them",
        "undrain_replica 1",
    ]


def test_what_is_not_known_of_a_replica_is_left_out_of_the_table() -> None:
    lines = render([asdict(ReplicaReport(3, "", "lost", (), "", 0, 0))], 0).splitlines()
    assert lines[1].split() == ["3", "?", "lost", "-", "-", "0", "0"]


def test_while_the_controller_is_started_anew_commands_are_refused_and_answers_still_come(
    tmp_path: Path, controller: Controller
) -> None:
    run_dir = write_state(tmp_path, state="rebuilding")
    with pytest.raises(ConfigError, match="is being started anew: try again in a minute"):
        ask_pool(run_dir, "list", say=said)
    write_state(tmp_path)

    def rebuild(text: str) -> None:
        write_state(tmp_path, state="rebuilding")

    with served(run_dir, controller):
        assert ask_pool(run_dir, "drain", 1, say=rebuild) == "drain_replica 1"
