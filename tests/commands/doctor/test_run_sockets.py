"""The sockets that the kernel reports, of a run whose processes are started here."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.cluster.handle import SPEC_FILE, SupervisorSpec, read_state, write_state
from megarl.commands.cli import main
from megarl.commands.doctor.listeners import LOOPBACK_FIX, Listener
from megarl.commands.doctor.run_sockets import (
    find_listeners,
    find_roles,
    is_on_loopback,
    is_open_to_others,
    judge_run,
    listening_paths,
)
from megarl.common.errors import ConfigError
from megarl.common.processes import ProcessId
from megarl.config.schema import Config
from tests.support.configs import config

SERVE = (
    "import socket,sys; s=socket.create_server(('{host}', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that listen, one on loopback and one on all interfaces."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE.format(host=host)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for host in ("127.0.0.1", "0.0.0.0")
    ]
    yield processes
    for process in processes:
        process.communicate(timeout=120)


def write_run(run_dir: Path, supervisor: int, *children: int, host: str | None = None, agent: int = 0) -> None:
    dead = ProcessId(2**22 + 1, 1)
    state = {
        "process": asdict(ProcessId.of(supervisor)),
        "agent": asdict(ProcessId.of(agent) if agent else dead),
        "children": [asdict(ProcessId.of(child)) for child in children],
        "host": host or platform.node(),
        "address": "127.0.0.1:6379",
    }
    write_state(run_dir, state)


def test_a_runs_sockets_are_listed_and_one_on_all_interfaces_fails(
    tmp_path: Path, serving: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    local, everywhere = serving
    ports = [process.stdout.readline().strip() for process in serving if process.stdout is not None]
    write_run(tmp_path, local.pid, everywhere.pid)
    assert main(["doctor", "--run", str(tmp_path)]) == 1
    table = capsys.readouterr().out
    assert f"127.0.0.1:{ports[0]}" in table and f"*:{ports[1]}" in table and "2 of 2 sockets are not locked" in table


def test_the_launchers_descendants_belong_to_the_run_and_this_command_does_not(
    tmp_path: Path, serving: list[subprocess.Popen[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        for process in serving:
            assert process.stdout is not None
            process.stdout.readline()
        write_run(tmp_path, serving[0].pid, agent=os.getppid())
        state = {"host": platform.node(), "process": asdict(ProcessId.of(serving[0].pid))}
        state["agent"] = asdict(ProcessId.of(os.getppid()))
        roles = find_roles(tmp_path, state)
        assert roles[os.getppid()] == "launcher" and os.getpid() not in roles
        mine = {pid: roles[pid] for pid in (serving[0].pid, serving[1].pid)}
        assert [(each.pid, each.kind) for each in find_listeners(mine)] == [(p.pid, "TCP") for p in serving]


def test_a_directory_without_a_living_run_here_is_one_message(
    tmp_path: Path, serving: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    assert "has no supervisor.json" in capsys.readouterr().err
    write_run(tmp_path, serving[0].pid, host="another-node")
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    assert "no process of" in (err := capsys.readouterr().err) and "another-node" in err


def write_spec(run_dir: Path, config: Config) -> None:
    (run_dir / "logs").mkdir(exist_ok=True)
    text = config.model_dump_json()
    SupervisorSpec(text, str(run_dir), ProcessId.own(), "abc", 0, "/", cuda=True).save(run_dir / "logs" / SPEC_FILE)


def test_a_socket_that_leaves_loopback_fails_unless_the_config_names_its_address(tmp_path: Path) -> None:
    write_run(tmp_path, os.getpid())
    state = read_state(tmp_path)
    assert state is not None
    roles = {1: "door", 2: "queue storage"}
    sockets = [Listener(pid, role, "TCP", "10.0.0.7", 5000) for pid, role in roles.items()]
    with pytest.raises(ConfigError, match="is gone, which tells what the run may listen on"):
        judge_run(tmp_path, state, sockets, roles)
    (other,) = judge_run(tmp_path, state, sockets[1:], {2: "queue storage"})
    assert (other.level, other.lock, other.fix) == ("fail", "curve", LOOPBACK_FIX)
    for host, failed in ((None, [1, 2]), ("10.0.0.7", [2]), ("10.0.0.8", [1, 2])):
        write_spec(tmp_path, config("model", door__enabled=True, door__host=host))
        verdicts = judge_run(tmp_path, state, sockets, roles)
        assert sorted(each.listener.pid for each in verdicts if each.level == "fail") == failed, host
    # The address of Ray, which tells of `launch.interface` and of further hosts.
    verdicts = judge_run(tmp_path, {**state, "address": "10.0.0.7:6379"}, sockets, roles)
    assert [each.level for each in verdicts] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("address", "changes", "expected"),
    [
        ("127.0.0.1:6379", {}, True),
        ("[::1]:6379", {}, True),
        ("10.0.0.7:6379", {}, False),
        ("", {}, True),  # Ray has none yet
        ("", {"launch__interface": "eth0"}, False),
        ("127.0.0.1:6379", {"ray__address": "127.0.0.1:6379"}, False),
        ("auto", {"ray__address": "auto"}, False),
    ],
)
def test_whether_the_run_is_on_loopback(address: str, changes: dict[str, str], expected: bool) -> None:
    assert is_on_loopback(address, config("model", **changes)) == expected


def test_unix_sockets_that_listen(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = tmp_path / "socket"
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as bound:
            server.bind(str(path))
            server.listen()
            bound.bind(str(tmp_path / "does-not-listen"))
            lines = Path("/proc/net/unix").read_text().splitlines()[1:]
            assert {each for each in listening_paths(lines) if each.startswith(str(tmp_path))} == {str(path)}
            [found] = [each for each in find_listeners({os.getpid(): "engine"}) if each.host == str(path)]
            assert found.kind == "unix" and not found.open_to_others
    finally:
        os.umask(before)


def test_a_closed_folder_closes_what_is_in_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder, inner = Path(name), Path(name) / "socket"
        inner.touch()
        inner.chmod(0o777)
        assert not is_open_to_others(inner)
        folder.chmod(0o755)
        assert is_open_to_others(inner) and is_open_to_others(Path("@abstract"))
        inner.chmod(0o755)
        assert not is_open_to_others(inner) and not is_open_to_others(folder / "removed")
