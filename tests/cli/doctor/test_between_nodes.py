"""`megarl doctor --nodes` with real processes over gloo: bandwidths, choice of interface, deadlines, who is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.cli.doctor.between_nodes import Meeting, Member, Outcome, plan_paths, render, run_probe, summary
from megarl.cli.doctor.between_nodes import Path as PathToTry
from megarl.cluster.pool.ray_head import ReservedPorts
from megarl.cluster.torchrun import SERVED_BY_VARIABLE
from megarl.common.errors import ConfigError
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
from megarl.common.trust.signed_store import serve_store
from tests.support.checkout import ROOT, environment, torchrun

pytestmark = pytest.mark.slow

DOCTOR = ("-m", "megarl", "doctor", "--nodes", "--mib", "1")
LIMIT_S = 240


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


@pytest.mark.parametrize("backend", ["megarl", "c10d"])
def test_two_nodes_of_a_torchrun_whose_store_is_closed_and_of_one_that_is_open(
    backend: str, port: int, tmp_path: Path
) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "megarl.cluster.torchrun.run", "--nnodes", "2", "--nproc-per-node", "1",
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
    reported, report = ("".join(each) for each in zip(*outputs, strict=True))
    if backend == "megarl":
        assert codes == [0, 0], outputs
        assert "2 processes on 2 nodes: node-" in reported and (tmp_path / "secret").exists()
        assert "broadcast from node 1" in reported and "the nodes can run together" in reported
    else:
        assert 0 not in codes and not reported, outputs
        assert "run code as you (SECURITY.md)" in report and "torchrun --rdzv-backend megarl" in report


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of rank 0 of two, whose torchrun serves a store; they share a secret."""
    store = serve_store("127.0.0.1", 0, 30.0)
    yield {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        SERVED_BY_VARIABLE: str(os.getppid()), RUN_DIR_VARIABLE: str(tmp_path),
    }  # fmt: skip
    del store


def test_a_member_that_never_comes_is_named_within_the_deadline(rank: dict[str, str]) -> None:
    meeting = Meeting(rank, timeout_s=0.2)
    with pytest.raises(ConfigError, match=r"waited 0 s for facts of ranks \[1\]"):
        meeting.gather("facts", {})


def test_what_no_member_has_signed_is_refused(rank: dict[str, str]) -> None:
    first, second = Meeting(rank, 30.0), Meeting({**rank, "RANK": "1"}, 30.0)
    first._store.set("doctor/0/facts-0", json.dumps("forged"))
    with pytest.raises(ConfigError, match=f"every rank needs the same {RUN_DIR_VARIABLE}"):
        second.gather("facts", "mine")
    assert first.gather("facts", "own") == ["own", "mine"]


@pytest.mark.parametrize("changes", [{SERVED_BY_VARIABLE: "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
def test_another_torchrun_is_refused_with_the_command_to_use(rank: dict[str, str], changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"torchrun --rdzv-backend megarl --nnodes N .*SECURITY\.md"):
        Meeting({**rank, **changes}, 30.0)


def test_an_unknown_interface_is_a_mistake_of_the_user(
    rank: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    assert main.main(["doctor", "--nodes", "--interface", "nope0", "--timeout", "30"]) == 2
    error = capsys.readouterr().err
    assert "--interface: this node has no 'nope0'" in error and "lo" in error


def test_a_hanging_probe_is_ended_and_its_stage_reported() -> None:
    code = 'print(\'{"stage": "all-reduce"}\', flush=True); import time; time.sleep(600)'
    outcome = run_probe([sys.executable, "-c", code], environment(), 5.0)
    assert outcome == Outcome({}, "all-reduce: did not finish within 5 s")


def test_a_probe_that_fails_tells_its_error() -> None:
    code = """print('{"stage": "connect"}'); raise RuntimeError("Unable to find address for: ib9")"""
    outcome = run_probe([sys.executable, "-c", code], environment(), 60.0)
    assert outcome == Outcome({}, "connect: RuntimeError: Unable to find address for: ib9")


def member(host: str, *interfaces: str, cuda: bool = False, route: str = "eth0") -> Member:
    return Member(host, {name: "10.0.0.1" for name in interfaces or ("eth0",)}, route, cuda)


def test_a_cpu_run_uses_gloo_on_its_route_and_other_shared_interfaces_are_tried() -> None:
    paths = plan_paths([member("a", "eth0", "ib0", "only-a"), member("b", "eth0", "ib0")], configured=False)
    assert [(path.name, path.required) for path in paths] == [("gloo on eth0", True), ("gloo on ib0", False)]
    first, *rest = plan_paths([member("a", "x", route="x"), member("b", "y", route="y")], configured=False)
    assert first.name == "gloo on x/y" and not rest
    assert [each["GLOO_SOCKET_IFNAME"] for each in first.environment] == ["x", "y"]


@pytest.mark.parametrize("configured", [False, True])
def test_gpus_add_nccl(configured: bool) -> None:
    paths = plan_paths([member(host, cuda=True) for host in "ab"], configured=configured)
    assert [path.name for path in paths] == ["gloo on eth0", "NCCL as it chooses"]
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0"} if configured else {}
    assert paths[1].environment == (chosen, chosen)


WORKS, SLOW = Outcome({"all-reduce": 2.0}), Outcome({"all-reduce": 0.5})
BROKEN = Outcome({}, "connect: did not finish within 5 s")


def path(required: bool = True) -> PathToTry:
    return PathToTry("gloo on eth0", "gloo", ({}, {}), required)


def test_a_path_that_a_run_uses_fails_the_command_and_another_one_does_not() -> None:
    members = [member("node-a"), member("node-b")]
    needed = summary(members, [(path(), [WORKS, BROKEN])])
    assert not needed["can_start"] and "node-b at connect: did not finish within 5 s" in render(needed)
    assert "fail" in render(needed) and "the nodes cannot run together" in render(needed)
    other = summary(members, [(path(), [WORKS, WORKS]), (path(required=False), [BROKEN, BROKEN])])
    assert other["can_start"] and "-  warn" in render(other)
