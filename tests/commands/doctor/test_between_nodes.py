"""`megarl doctor --nodes` with real processes over gloo: bandwidths, choice of interface, deadlines, who is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.commands import cli
from megarl.commands.doctor.between_nodes import run_probe
from megarl.commands.doctor.paths import PathResult, PathToTry, advice
from megarl.common.reserved_ports import ReservedPorts
from tests.support.attack import addresses
from tests.support.checkout import ROOT, environment, torchrun

DOCTOR = ("-m", "megarl", "doctor", "--nodes", "--mib", "1")
LIMIT_S = 120


@pytest.fixture
def port() -> Iterator[int]:
    with ReservedPorts(1) as reserved:
        yield reserved.ports[0]


def test_two_processes_of_torchrun_on_the_chosen_interface() -> None:
    done = subprocess.run(
        torchrun(2, *DOCTOR, "--json", "--interface", "lo", "--timeout", "60"), env=environment(), cwd=ROOT,
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index("{") :])
    path = report["paths"][0]
    assert report["can_start"] and path["path"] == "gloo on lo" and path["required"] and path["ok"]
    assert path["gb_per_second"].keys() == {"all-reduce", "broadcast from node 0"}
    assert all(rate > 0 for rate in path["gb_per_second"].values())


def start(rank: int, size: int, port: int, *options: str, **variables: str) -> subprocess.Popen[str]:
    """One member, as torchrun would start it."""
    return subprocess.Popen(
        [sys.executable, *DOCTOR, *options], env=environment(**place(rank, size, port), **variables), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets; the members meet at `port`, the one after torchrun's own."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port - 1),
    }  # fmt: skip


def test_while_it_waits_its_store_listens_at_one_address(port: int) -> None:
    waiting = start(0, 2, port, "--interface", "lo", "--timeout", "60")
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (found := addresses(port, waiting.pid)) and time.monotonic() < deadline and waiting.poll() is None:
            time.sleep(0.1)
        assert found == {"127.0.0.1"}
    finally:
        waiting.kill()
        waiting.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("backend", ["megarl", "c10d"])
def test_two_nodes_of_a_torchrun_whose_store_is_closed_and_of_one_that_is_open(
    backend: str, port: int, tmp_path: Path
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--rdzv-backend", backend, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1",
             "--rdzv-conf", f"is_host={first}", *DOCTOR, "--interface", "lo", "--timeout", "60"],
            env=environment(MEGARL_RUN_DIR=str(tmp_path), SLURMD_NODENAME=f"node-{first}"), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for first in ("true", "false")
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    told, report = ("".join(each) for each in zip(*outputs, strict=True))
    if backend == "megarl":
        assert codes == [0, 0], outputs
        assert "2 processes on 2 nodes: node-" in told and (tmp_path / "secret").exists()
    else:
        assert 0 not in codes and not told, outputs
        assert report.count("run code as you (SECURITY.md). Start the same on every node by: MEGARL_RUN_DIR=") == 1
        assert "torchrun --rdzv-backend megarl --nnodes 2 --nproc-per-node 1 --rdzv-endpoint 127.0.0.1:29400" in report


@pytest.mark.slow
def test_three_nodes_have_a_rate_for_each_pair(port: int) -> None:
    options = ("--interface", "lo", "--timeout", "60")
    processes = [start(rank, 3, port, *options, SLURMD_NODENAME=f"node-{rank}") for rank in range(3)]
    outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    table = outputs[0][0]
    assert "3 processes on 3 nodes: node-0, node-1, node-2" in table
    for operation in ("broadcast from node 2", "all-reduce of nodes 0 and 1", "all-reduce of nodes 2 and 0"):
        assert operation in table
    assert outputs[1][0] == "" == outputs[2][0]  # rank 0 reports


def refused_here(rank: int, size: int, port: int, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Run the command in this process as one member; return its exit status. No probe is reached."""
    for name, value in place(rank, size, port).items():
        monkeypatch.setenv(name, value)
    return cli.main(["doctor", "--nodes", *options])


def test_a_member_that_never_comes_is_named_within_the_deadline(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_here(0, 2, port, monkeypatch, "--interface", "lo", "--timeout", "2") == 2
    assert "waited 2 s for member of ranks [1], 1 of 2 have answered" in capsys.readouterr().err


def test_an_unknown_interface_is_a_mistake_of_the_user(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused_here(0, 1, port, monkeypatch, "--interface", "nope0", "--timeout", "30") == 2
    error = capsys.readouterr().err
    assert "--interface: this node has no 'nope0'" in error and "lo" in error


def test_a_hanging_probe_is_ended_and_its_stage_told() -> None:
    code = 'print(\'{"stage": "all-reduce"}\', flush=True); import time; time.sleep(60)'
    outcome = run_probe([sys.executable, "-c", code], environment(), 1.5)
    assert outcome.error == "no end within 2 s" and outcome.stage == "all-reduce"


def test_a_process_that_holds_the_output_of_a_killed_probe_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.commands.doctor.between_nodes.REAP_S", 0.5)
    pid = tmp_path / "pid"
    script = f'sleep 3000 & echo $! > {pid}; echo \'{{"stage": "all-reduce"}}\'; wait'
    try:
        outcome = run_probe(["bash", "-c", script], environment(), 5)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert outcome.stage == "all-reduce"
    assert outcome.error == (
        "no end within 5 s; the doctor waited 0.5 s more for a process that holds the output of the killed probe"
    )


@pytest.mark.parametrize(
    ("variables", "told"), [({"GLOO_SOCKET_IFNAME": "nope0"}, "not on every node"), ({}, "open all TCP ports")]
)
def test_a_probe_that_cannot_connect_names_the_fix(port: int, variables: dict[str, str], told: str) -> None:
    """The causes are a wrong interface, and a rank 0 that nobody can reach."""
    from torch import distributed

    listening = bool(variables)
    store = distributed.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if listening else None
    command = [
        sys.executable, "-m", "megarl.commands.doctor.path_probe", "127.0.0.1", str(port), "x", "0", "1", "gloo", "cpu",
        "1", "2", "0",
    ]  # fmt: skip
    outcome = run_probe(command, environment(**variables), 60)
    del store
    path = PathToTry("gloo", "gloo", ({},), True)
    assert outcome.error is not None and outcome.stage == "connect"
    assert told in advice(path, [outcome]), outcome
    assert not PathResult(path, (outcome,)).ok
