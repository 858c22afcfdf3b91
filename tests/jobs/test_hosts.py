"""launch/multinode.sh over four hosts with addresses, names and process ids of their own."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.file_faults import preloading, spoil
from tests.support.checkout import ROOT, environment
from tests.support.runs.fault_table import moments
from tests.support.runs.hosts import Hosts
from tests.support.runs.jobs import (
    FOUR_HOSTS,
    check_groups,
    check_steps,
    exit_record,
    some_steps,
    start_job,
    wait_for,
    write_job,
)
from tests.support.runs.run import step_records

pytestmark = pytest.mark.cluster

STALE_S = 8.0


def commands(hosts: Hosts, index: int) -> str:
    return "\n".join(" ".join(process.cmdline()) for process in hosts.processes(index))


def engine_pids(hosts: Hosts) -> set[int]:
    return {p.pid for i in (2, 3) for p in hosts.processes(i) if "ray::EngineReplica" in " ".join(p.cmdline())}


def is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(word.endswith("train_rl.py") for word in command) and "megarl.cluster.torchrun.run" not in command


def check_places(hosts: Hosts) -> None:
    """Ranks on the trainer hosts, an engine on each rollout host, and nothing of the one on the other."""
    for index in (0, 1):
        here = commands(hosts, index)
        assert "train_rl.py" in here and "raylet" in here
        assert "EngineReplica" not in here and "gcs_server" not in here
    for index in (2, 3):
        here = commands(hosts, index)
        assert here.count("ray::EngineReplica") == 1 and "train_rl.py" not in here
        assert ("gcs_server" in here) == (index == 2)


def check_ports(hosts: Hosts) -> None:
    """On each host nothing but Ray's calls listens on all interfaces; the rest is at the host's address or on loopback.

    Ray's gRPC takes all interfaces between several nodes (SECURITY.md): one port of a process, and two of a raylet.
    torch's own store, which unpickles what it is sent, would be one more.
    """
    for index, address in enumerate(hosts.addresses):
        listed = hosts.call(index, sys.executable, "-m", "tests.support.attacks.open_sockets")
        assert listed.returncode == 0, listed.stdout + listed.stderr
        ports = json.loads(listed.stdout)
        expected = "train_rl.py" if index < 2 else "ray::EngineReplica"
        assert any(expected in port["command"] for port in ports), (expected, ports)
        assert {port["host"] for port in ports} <= {"127.0.0.1", address, "::"}, (index, ports)
        wild = Counter(port["pid"] for port in ports if port["host"] == "::")
        raylets = {port["pid"] for port in ports if "raylet/raylet" in port["command"]}
        assert all(count <= (2 if pid in raylets else 1) for pid, count in wild.items()), (index, ports)


def check_stale_handles(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """The signs of life of nodes, run and pool cannot be written or read for a time, and the job goes on."""
    answers = spoil(run_dir.with_suffix(".orders"), STALE_S, lambda: process.poll() is not None)
    assert {"claim.json", "supervisor.json", *(f"node-{index}.json" for index in range(4))} <= answers.keys(), answers
    before = len(step_records(run_dir))
    wait_for(lambda: len(step_records(run_dir)) > before + 2 or process.poll() is not None, 600, "further steps")
    assert process.poll() is None


def test_a_job_runs_to_its_end(hosts: Hosts, tmp_path: Path) -> None:
    config = write_job(tmp_path, steps=4, **FOUR_HOSTS)
    run_dir = tmp_path / "run"
    process, log = start_job(hosts, config)
    try:
        wait_for(lambda: len(step_records(run_dir)) > 0 or process.poll() is not None, 400, "the first step", log)
        assert process.wait(timeout=600) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
    assert exit_record(run_dir)["status"] == "finished"
    check_steps(run_dir, 4)
    check_groups(run_dir)
    assert not any(hosts.processes(index) for index in range(4))


@pytest.mark.slow
def test_each_host_has_a_rank_and_an_engine_where_they_share_gpus(two_hosts: Hosts, tmp_path: Path) -> None:
    """A rank relays weights to the engine on its own host only."""
    rollout = {"replicas": 2, "share_gpus": True, "max_model_len": 64}
    config = write_job(tmp_path, steps=4, trainer={"gpus_per_node": 1}, rollout=rollout)
    run_dir = tmp_path / "run"
    process, log = start_job(two_hosts, config)
    try:
        wait_for(lambda: len(step_records(run_dir)) > 0 or process.poll() is not None, 400, "the first step", log)
        for index in (0, 1):
            here = commands(two_hosts, index)
            assert here.count("ray::EngineReplica") == 1 and "train_rl.py" in here, log.read_text()[-4000:]
        assert process.wait(timeout=600) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
    check_steps(run_dir, 4)
    check_groups(run_dir)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_a_lost_host_ends_the_job_with_its_name(hosts: Hosts, tmp_path: Path) -> None:
    """First a trainer rank is killed: the ranks of both hosts restart. Then a trainer host loses its power.

    Before that each host's sockets are looked at, and file handles are stale for a time. A seed draws which rank is
    killed, and the moments.
    """
    config = write_job(
        tmp_path, steps=100_000, timeouts={"node_s": 20, "shutdown_s": 20, "save_s": 60},
        checkpoint={"every": 2}, launch={"interface": "eth0"}, **FOUR_HOSTS,
    )  # fmt: skip
    run_dir, rng = tmp_path / "run", moments()
    process, log = start_job(hosts, config, **preloading(run_dir, run_dir.with_suffix(".orders")))
    try:
        saved = run_dir / "checkpoints"
        wait_for(lambda: len(step_records(run_dir)) > 4 or process.poll() is not None, 400, "some steps", log)
        wait_for(lambda: any(saved.glob("iter_*/manifest.json")), 600, "a checkpoint", log)
        check_places(hosts)
        check_ports(hosts)
        check_stale_handles(run_dir, process)
        engines = engine_pids(hosts)
        some_steps(rng, run_dir, process, log, 100)
        (rank,) = [p for p in hosts.processes(rng.randrange(2)) if is_rank(p)]
        rank.kill()
        wait_for(
            lambda: log.read_text().count("engines are up") == 2 or process.poll() is not None, 300, "a restart", log
        )
        before = len(step_records(run_dir))
        wait_for(
            lambda: len(step_records(run_dir)) > before + 2 or process.poll() is not None, 100, "further steps", log
        )
        assert process.poll() is None, log.read_text()[-4000:]
        assert engine_pids(hosts) == engines
        some_steps(rng, run_dir, process, log, 100)
        hosts.lose(1)
        assert process.wait(timeout=240) == 1, log.read_text()[-4000:]
    finally:
        process.kill()
    lost = hosts.addresses[1]
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith(f"megarl: node {lost} failed: lost, silent for 20 s"), log.read_text()[-4000:]
    # Whoever notices first writes it: an agent, which names the host, or rank 0, which names what it waited for.
    record = exit_record(run_dir)
    assert record["status"] == "failed" and (lost in record["reason"] or "rank" in record["reason"]), record
    check_groups(run_dir)
    assert not any(hosts.processes(index) for index in range(4))


@pytest.mark.slow
def test_a_lost_host_with_engines_only_shrinks_the_pool_which_grows_when_it_is_back(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The ranks are not restarted, and every group of every step is accounted for; then a SIGTERM stops the job."""
    timeouts = {"node_s": 15, "rpc_s": 20, "shutdown_s": 20, "save_s": 60}
    config = write_job(tmp_path, steps=100_000, timeouts=timeouts, **FOUR_HOSTS)
    run_dir, rng = tmp_path / "run", moments()
    process, log = start_job(hosts, config)

    def alive() -> float:
        """The number of engines in the last step."""
        return step_records(run_dir)[-1]["rollout/replicas_alive"]

    def engines(count: int, timeout_s: float, what: str) -> None:
        """Wait for three steps with so many engines."""
        wait_for(lambda: alive() == count or process.poll() is not None, timeout_s, what, log)
        before = len(step_records(run_dir))
        wait_for(
            lambda: len(step_records(run_dir)) > before + 2 or process.poll() is not None, 100, "further steps", log
        )
        assert process.poll() is None and alive() == count, log.read_text()[-4000:]

    try:
        wait_for(lambda: len(step_records(run_dir)) > 2 or process.poll() is not None, 400, "some steps", log)
        check_places(hosts)
        engines(2, 10, "both engines")
        some_steps(rng, run_dir, process, log, 100)
        hosts.lose(3)
        lost = time.monotonic()
        wait_for(
            lambda: "1 lost, which will be replaced as soon as there is room" in log.read_text(),
            240,
            "the pool to shrink",
            log,
        )
        shrunk = time.monotonic() - lost
        engines(1, 60, "steps with one engine")
        print(f"the pool shrank {shrunk:.0f} s after the loss; 3 further steps after {time.monotonic() - lost:.0f} s")
        assert f"node {hosts.addresses[3]} is lost, silent for 15 s" in log.read_text()
        some_steps(rng, run_dir, process, log, 100)
        hosts.revive(3)
        back = time.monotonic()
        (launch,) = (run_dir / "launch").glob("*/launch.json")
        again = f"cd {ROOT} && exec {sys.executable} -m megarl.cluster.nodes.launcher {launch} 3"
        agent = subprocess.Popen(
            [hosts.rsh, hosts.addresses[3], again], env=environment(), stdin=subprocess.DEVNULL, start_new_session=True
        )
        wait_for(lambda: "replaced lost engines: 1" in log.read_text(), 200, "the pool to grow", log)
        engines(2, 100, "steps with both engines")
        print(f"3 steps with both engines {time.monotonic() - back:.0f} s after the host was back")
        process.terminate()  # the launch script, which asks all hosts to stop
        assert process.wait(timeout=600) == 0, log.read_text()[-4000:]
        assert agent.wait(timeout=600) == 0
    finally:
        process.kill()
    assert f"node {hosts.addresses[3]} is back" in log.read_text()
    assert log.read_text().count("engines are up") == 1, "the ranks were restarted"
    check_steps(run_dir)
    check_groups(run_dir)
    stopped = exit_record(run_dir)
    assert (stopped["status"], stopped["reason"]) == ("preempted", "SIGTERM")
    assert not any(hosts.processes(index) for index in range(4))
