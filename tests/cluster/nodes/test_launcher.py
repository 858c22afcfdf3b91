"""The agent's judgement: how its processes end decides how the job ends. Pool and ranks are shell scripts here."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from megarl.cluster.nodes import commands
from megarl.cluster.nodes import launcher as module
from megarl.cluster.nodes import processes as node_processes
from megarl.cluster.nodes.__main__ import main as nodes_main
from megarl.cluster.nodes.launcher import NodeLauncher, can_lose
from megarl.cluster.nodes.node_files import NodeBoard, NodeFailure, NodeRecord
from megarl.cluster.nodes.processes import NodeProcesses, StoppedProcesses
from megarl.cluster.nodes.spec import LaunchSpec, launch_directory
from megarl.common.process.processes import ProcessId, descendants, is_alive, kill, state_of
from megarl.common.rundir import run_files as stopping
from megarl.common.rundir.notices import notices_file
from megarl.common.rundir.run_files import ExitRecord
from megarl.common.rundir.run_lock import CLAIM_FILE, Holder
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from tests.support.checkout import ROOT
from tests.support.pool.leftovers import marked, survivors
from tests.support.trainer.configs import config
from tests.support.waiting import wait_until

# Says that it has ended when it is asked to, as the real supervisor does. Records appear complete, by a rename: `echo`
# alone leaves a moment in which the file is empty.
POOL = """
while [ ! -e {run}/supervisor.stop ]; do sleep 0.05; done
echo '{{"launch_id": "1", "state": "stopped", "error": "asked to"}}' > {run}/new
mv {run}/new {run}/supervisor.json
"""
GOOD_RANKS = """
echo '{{"status": "finished", "step": 4, "reason": ""}}' > {run}/end; mv {run}/end {run}/exit.json
echo 1 > {run}/supervisor.stop
"""


@pytest.fixture(scope="module")
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process that is no part of any job, as the ranks of test worlds are."""
    started = subprocess.Popen(["sleep", "600"])
    yield started
    started.kill()
    started.wait(timeout=60)


@pytest.fixture(autouse=True)
def _children_of_the_job_only(monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]) -> None:
    """An agent kills all descendants of its process: one that runs in this process must spare those of other tests."""
    others = descendants(os.getpid())
    monkeypatch.setattr(node_processes, "descendants", lambda pid: descendants(pid) - others)


class Job:
    def __init__(self, directory: Path, **changes: Any) -> None:
        self.run_dir = directory / "run"
        chosen = config("model", run__dir=str(self.run_dir), **changes)
        where = launch_directory(self.run_dir, "1")
        where.mkdir(parents=True)
        (self.run_dir / "logs").mkdir()
        hosts = tuple(f"n{i}" for i in range(4)) if changes else ("here",)
        self.spec = LaunchSpec("1", chosen.model_dump_json(), str(where), str(ROOT), False, hosts, "train.py", 0)
        self.spec.save()
        self.board = NodeBoard(where)

    def start(self, pool: str = POOL, ranks: str = GOOD_RANKS, index: int = 0) -> subprocess.Popen[bytes]:
        scripts = [script.format(run=self.run_dir) for script in (pool, ranks)]
        command = [sys.executable, "-m", "tests.support.pool.agent_process", str(self.spec.path), str(index), *scripts]
        return subprocess.Popen(command, cwd=ROOT, env=marked(self.run_dir))

    def run(self, *args: Any, **kwargs: Any) -> int:
        process = self.start(*args, **kwargs)
        try:
            return process.wait(timeout=60)
        finally:
            process.kill()
            assert not survivors(self.run_dir)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


FOUR: dict[str, Any] = {
    "trainer": {"gpus": 2, "gpus_per_node": 1, "precision": "fp32", "micro_batch_tokens": 256},
    "rollout": {"replicas": 2, "gpus_per_node": 1},
    "timeouts": {"node_s": 1.0},
}


def test_a_run_that_finishes(job: Job) -> None:
    assert job.run() == 0
    record = job.board.read(0)
    assert record is not None and record.state == "done" and job.board.failure() is None


def test_ranks_that_fail_end_the_job_with_their_own_message(job: Job) -> None:
    """The pool, which a failing rank has asked to stop, is not taken for the cause."""
    ranks = """
    echo 'megarl: loss is NaN' > {run}/error.txt; echo 1 > {run}/supervisor.stop; sleep 1.5; exit 1
    """
    assert job.run(ranks=ranks) == 1
    failure = job.board.failure()
    assert failure == NodeFailure("here", "loss is NaN")
    assert stopping.read_exit(job.run_dir) == ExitRecord("failed", 0, "node here: loss is NaN")


def test_ranks_that_were_killed(job: Job) -> None:
    assert job.run(ranks="kill -9 $$") == 1
    failure = job.board.failure()
    assert failure is not None and failure.reason.startswith("a trainer rank was killed (torchrun ended with code -9)")


def test_a_run_that_was_stopped_ends_well_whatever_torchruns_code(job: Job) -> None:
    ranks = """
    while [ ! -e {run}/stop ]; do sleep 0.05; done
    echo '{{"status": "preempted", "step": 2, "reason": "x"}}' > {run}/end; mv {run}/end {run}/exit.json
    echo 1 > {run}/supervisor.stop; exit 1
    """
    process = job.start(ranks=ranks)
    try:
        wait_until(lambda: job.board.read(0) is not None, 60, "the node's record")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert stopping.stop_reason(job.run_dir) == "SIGTERM on node here"
    assert not survivors(job.run_dir)


def test_a_pool_that_dies_ends_the_job(job: Job) -> None:
    pool = """
    echo '{{"launch_id": "1", "state": "failed", "error": "engine replica 0: out of memory"}}' > {run}/new
    mv {run}/new {run}/supervisor.json
    exit 1
    """
    assert job.run(pool=pool, ranks="exec sleep 100") == 1
    assert job.board.failure() == NodeFailure("here", "the rollout pool ended: engine replica 0: out of memory")
    assert job.run(pool="exit 9", ranks="exec sleep 100") == 1


def test_another_nodes_failure_ends_this_one(tmp_path: Path) -> None:
    job = Job(tmp_path, **FOUR)
    job.board.claim_failure(NodeFailure("n3", "no GPU"))
    assert job.run(index=1) == 1
    assert job.board.failure() == NodeFailure("n3", "no GPU")


def test_a_silent_node_is_named(tmp_path: Path) -> None:
    """The first node watches all: here n1 and n3 live, n2 was never heard of."""
    job = Job(tmp_path, **FOUR)
    process = job.start(ranks="exec sleep 100")
    try:
        beat, seen = 0, False
        while process.poll() is None and beat < 2000:
            beat += 1
            seen = seen or any(each.info["name"] == "sleep" for each in survivors(job.run_dir))
            for index in (1, 3):
                job.board.post(NodeRecord(index, f"n{index}", "10.0.0.1", "running", beat))
            time.sleep(0.1)
        assert process.wait(timeout=60) == 1
        assert seen and not survivors(job.run_dir), "the ranks, whose command line names no run"
    finally:
        process.kill()
    assert job.board.failure() == NodeFailure("n2", "not started within 1 s")
    assert json.loads((job.run_dir / "exit.json").read_text())["reason"] == "node n2: not started within 1 s"


def agent_of(job: Job, index: int = 0) -> NodeLauncher:
    return NodeLauncher(job.spec, index)


SHARED: dict[str, Any] = {
    "trainer": {"gpus": 4, "gpus_per_node": 2, "precision": "fp32", "micro_batch_tokens": 256},
    "rollout": {"replicas": 4, "gpus_per_node": 2, "nodes": "shared"},
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("given", "message"), [(None, "0,1"), ("4,5,6,7", "4,5")])
def test_torchrun_sees_the_gpus_of_the_trainer_only_on_every_shared_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, given: str | None, message: str
) -> None:
    """Its environment, as a child has it; the agent's own names those that SLURM has given to the whole node."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    job, seen = Job(tmp_path, **SHARED), tmp_path / "seen"
    job.spec = replace(job.spec, cuda=True)
    job.board.post(NodeRecord(0, "n0", "127.0.0.1", "running", 1, "127.0.0.1:1"))
    show = ["sh", "-c", f"echo $CUDA_VISIBLE_DEVICES > {seen}"]
    monkeypatch.setattr(commands, "torchrun_command", lambda *arguments, **options: show)
    agent = agent_of(job, index)
    agent._start_torchrun()
    torchrun = agent._processes.torchrun
    assert torchrun is not None and torchrun.wait(timeout=60) == 0
    assert seen.read_text() == f"{message}\n"


def write_pool_state(job: Job, state: str) -> None:
    (job.run_dir / "supervisor.json").write_text(json.dumps({"launch_id": "1", "state": state, "error": None}))


@pytest.mark.parametrize(
    ("index", "state", "ended", "spared"),
    [
        (3, "ready", False, True),
        (3, "rebuilding", False, True),  # the controller and the queue; all engines were up before
        (3, "starting", False, False),  # the plan does not fit
        (3, "ready", True, False),  # its processes have to end well
        (2, "ready", False, False),  # the supervisor's
        (1, "ready", False, False),  # the trainer's
    ],
)
def test_only_a_node_with_engines_only_can_be_lost_and_only_while_the_run_goes_on(
    tmp_path: Path, index: int, state: str, ended: bool, spared: bool
) -> None:
    job = Job(tmp_path, **FOUR)
    write_pool_state(job, state)
    if ended:
        stopping.write_exit(job.run_dir, ExitRecord("finished", 4, ""))
    assert can_lose(job.spec, index) is spared
    assert nodes_main(["fail", str(job.spec.path), f"n{index}", "no connection"]) == 0
    assert job.board.failure() == (None if spared else NodeFailure(f"n{index}", "no connection"))


def test_a_lost_node_with_engines_only_is_reported_once_and_again_when_it_is_back(tmp_path: Path) -> None:
    job = Job(tmp_path, **FOUR)
    write_pool_state(job, "ready")
    agent, silent = agent_of(job), list[tuple[int, NodeRecord | None]]()
    agent._watch.lost = lambda: silent  # type: ignore[method-assign]
    silent.append((3, NodeRecord(3, "n3", "10.0.0.3", "running", 7)))
    for _ in range(3):
        agent._check_peers()
    silent.clear()
    for _ in range(3):
        agent._check_peers()
    notices = [json.loads(line)["text"] for line in notices_file(job.run_dir).read_text().splitlines()]
    assert notices == ["node n3 is lost, silent for 1 s; the run continues", "node n3 is back"]
    assert job.board.failure() is None
    silent.append((1, NodeRecord(1, "n1", "10.0.0.1", "running", 7)))
    agent._check_peers()
    assert job.board.failure() == NodeFailure("n1", "lost, silent for 1 s")


def test_a_raylet_that_was_given_up_is_started_again_where_nothing_but_engines_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, now, started = Job(tmp_path, **FOUR), [100.0], list[int]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ended(index: int) -> NodeLauncher:
        agent = agent_of(job, index)
        processes = agent._processes
        processes.raylet = subprocess.Popen(["false"])
        processes.raylet.wait()
        monkeypatch.setattr(processes, "_spawn", lambda *arguments: started.append(index) or processes.raylet)
        return agent

    write_pool_state(job, "ready")
    agent = ended(3)
    with subprocess.Popen(["sleep", "60"]) as engine:
        agent._processes.raylet_children = {ProcessId.of(engine.pid)}
        for times in (1, 2):  # the second one ends too
            for _ in range(4):
                agent._check_raylet(ending=False)
                now[0] += node_processes.REJOIN_S / 3
            assert started == [3] * (times - 1)
            now[0] += 1
            agent._check_raylet(ending=False)
            assert started == [3] * times
        ended_by, _ = engine.poll(), engine.kill()
    assert ended_by == -signal.SIGTERM, "an engine that the raylet has left would keep its GPU"
    with pytest.raises(module.NodeFailed, match="Ray's raylet ended with code 1"):
        ended(1)._check_raylet(ending=False)
    write_pool_state(job, "starting")
    with pytest.raises(module.NodeFailed, match="Ray's raylet ended with code 1"):
        ended(3)._check_raylet(ending=False)


@pytest.mark.parametrize(
    ("error", "spared"),
    [(OSError("its disk is gone"), True), (module.AskedAgain("received a second stop signal"), False)],
)
def test_a_failure_of_a_node_with_engines_only_ends_that_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, spared: bool
) -> None:
    job = Job(tmp_path, **FOUR)
    write_pool_state(job, "ready")
    agent = agent_of(job, 3)

    def fail() -> None:
        raise error

    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(agent, "_start", fail)
    monkeypatch.setattr(agent._processes, "end_all", lambda: None)
    assert agent.run() == 1
    assert (job.board.failure() is None) is spared


@pytest.mark.parametrize("index", [0, 3])
def test_what_an_agent_starts_knows_the_address_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """The stores of sync and saves listen there: where other nodes reach them, and nowhere else."""
    started: list[str | None] = []

    def start(*arguments: object, **options: object) -> None:
        started.append(os.environ.get(NODE_ADDRESS_VARIABLE))

    monkeypatch.setattr(module, "own_address", lambda hosts, interface: f"10.0.0.{index}")
    monkeypatch.setattr(module, "interface_of", lambda address: "eth7")
    monkeypatch.setattr(node_processes, "start_supervisor", start)
    monkeypatch.setattr(NodeProcesses, "_spawn", start)
    with mock.patch.dict(os.environ):
        NodeLauncher(Job(tmp_path, **FOUR).spec, index)._start()
    assert started == [f"10.0.0.{index}"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOSPC, errno.EIO])
def test_a_file_system_that_fails_for_a_while_ends_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    agent = agent_of(job)
    now, failures = [100.0], [OSError(number, "for a while")] * 3

    def failure() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agent.board, "failure", failure)
    monkeypatch.setattr(agent, "_start_torchrun", lambda: None)
    for _ in range(5):
        now[0] += 0.9 * agent.config.timeouts.node_s / 3
        assert agent._tick_or_wait() is False
    failures += [OSError(number, "for good")] * 9
    with pytest.raises(
        module.NodeFailed, match=r"its file system has failed for 120 s \(timeouts.node_s\): .*for good"
    ):
        for _ in range(9):
            now[0] += 50
            agent._tick_or_wait()


def test_a_rank_that_stays_stopped_is_killed_and_nothing_else(job: Job) -> None:
    """With no other rank on its node nobody else can, and torchrun would leave it the time to save."""
    agent = agent_of(job)
    ranks = "import subprocess; children = [subprocess.Popen(['sleep', '60']) for _ in range(2)]; children[0].wait()"
    torchrun = agent._processes.torchrun = subprocess.Popen([sys.executable, "-c", f"{ranks}; children[1].wait()"])
    try:
        wait_until(lambda: len(descendants(torchrun.pid)) == 2, 60, "the ranks")
        stopped, sound = descendants(torchrun.pid)
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(stopped) == "T", 60, "the rank to stop")
        agent._processes.kill_stopped_ranks()
        assert is_alive(stopped), "other ranks name it first"
        agent._processes._stopped = StoppedProcesses(bound_s=-1.0)
        agent._processes.kill_stopped_ranks()
        wait_until(lambda: not is_alive(stopped), 60, "the end of the rank")
        assert is_alive(sound) and torchrun.poll() is None
    finally:
        kill([*descendants(torchrun.pid), ProcessId.of(torchrun.pid)], signal.SIGKILL)
        torchrun.wait()


def test_a_stop_signal_that_the_disk_does_not_take_reaches_the_ranks_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the handler would end the whole job at once, instead of after a save."""
    agent, real = agent_of(job), stopping.ask_to_stop
    failures = [OSError(errno.ESTALE, "Stale file handle")] * 3

    def ask(run_dir: Path, reason: str) -> None:
        if failures:
            raise failures.pop()
        real(run_dir, reason)

    monkeypatch.setattr(module.run_files, "ask_to_stop", ask)
    monkeypatch.setattr(agent, "_start_torchrun", lambda: None)
    agent._on_signal(signal.SIGTERM, None)
    assert stopping.stop_reason(job.run_dir) is None
    for _ in range(3):
        assert agent._tick_or_wait() is False
    assert stopping.stop_reason(job.run_dir) == "SIGTERM on node here"
    (job.run_dir / stopping.STOP_FILE).unlink()
    agent._tick_or_wait()
    assert stopping.stop_reason(job.run_dir) is None, "a request that was withdrawn is not made again"


def test_a_signal_during_the_end_interrupts_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAME_REQUEST_S", 0.0)
    agent = agent_of(job)
    agent._on_signal(signal.SIGTERM, None)
    monkeypatch.setattr(agent, "_start", lambda: agent._on_signal(signal.SIGTERM, None))
    monkeypatch.setattr(agent._processes, "end_all", lambda: agent._on_signal(signal.SIGTERM, None))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert agent.run() == 1
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    failure = job.board.failure()
    assert failure is not None and "second stop signal" in failure.reason


def test_one_ctrl_c_that_arrives_twice_is_one_request(job: Job) -> None:
    agent = agent_of(job)
    for _ in range(3):
        agent._on_signal(signal.SIGINT, None)
    assert agent._signals == 1 and stopping.stop_reason(job.run_dir) is not None


def test_a_stop_signal_does_not_stop_the_run_that_has_taken_the_directory(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that ends a suspended job continues it and signals it at the same time."""
    (job.run_dir / CLAIM_FILE).write_bytes(msgspec.json.encode(Holder.here("torchrun", ProcessId.own())))
    agent = agent_of(job)
    with pytest.raises(module.DirectoryLost, match="was taken by torchrun"):
        agent._on_signal(signal.SIGTERM, None)
    assert stopping.stop_reason(job.run_dir) is None


class FakeSupervisor:
    """A supervisor's process that ends by SIGTERM."""

    def __init__(self) -> None:
        self.pid, self.terminated = 2**30, False

    def poll(self) -> int | None:
        return 0 if self.terminated else None

    def terminate(self) -> None:
        self.terminated = True


@pytest.mark.parametrize("found", ["at_the_start", "later", "by_another_failure"])
def test_nothing_is_written_into_a_directory_that_is_another_runs(
    job: Job, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes], found: str
) -> None:
    other = Holder.here("torchrun", ProcessId.own())
    (job.run_dir / CLAIM_FILE).write_bytes(msgspec.json.encode(other))
    agent = agent_of(job)
    supervisor: Any = FakeSupervisor()
    agent._processes.supervisor = supervisor
    monkeypatch.setattr(module.ProcessId, "of", lambda pid: ProcessId(pid, -1))
    if found != "at_the_start":
        error = module.DirectoryLost("taken") if found == "later" else ValueError("no such thing")
        monkeypatch.setattr(agent, "_start", lambda: (_ for _ in ()).throw(error))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert agent.run() == 1
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    assert supervisor.terminated and bystander.poll() is None
    assert sorted(path.name for path in job.run_dir.iterdir()) == [CLAIM_FILE, "launch", "logs"]
    assert (job.run_dir / CLAIM_FILE).read_bytes() == msgspec.json.encode(other)
    failure = job.board.failure()
    message = {"at_the_start": "is in use by torchrun", "later": "taken", "by_another_failure": "no such thing"}
    assert failure is not None and message[found] in failure.reason
