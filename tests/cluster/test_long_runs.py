"""Thousands of heartbeats of what watches a run, while processes come and go: nothing keeps those that have gone."""

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from megarl.cluster.nodes import processes as node_processes
from megarl.cluster.nodes.launcher import NodeLauncher
from megarl.cluster.nodes.spec import LaunchSpec, launch_directory
from megarl.cluster.pool.pool_process import STATE_FILE, SupervisorSpec
from megarl.cluster.pool.supervisor import Supervisor
from megarl.common.process.processes import ProcessId
from tests.support.measures.growth import held_bytes, in_own_process, slopes_over
from tests.support.trainer.configs import config

pytestmark = pytest.mark.slow

EVERY = 500
STEPS = 20_000
MOST_BYTES = 100_000


def passing_by() -> Callable[..., set[ProcessId]]:
    """Return a function that finds this process, which lives, and each time two others that end at once."""
    own, numbers = ProcessId.own(), iter(range(10**9))
    return lambda *_: {own, *(ProcessId(os.getpid(), -1 - next(numbers)) for _ in range(2))}


def sizes_of(held: Callable[[], Any], directory: Path) -> Callable[[], dict[str, float]]:
    def sizes() -> dict[str, float]:
        held_now = held_bytes(held())
        assert held_now < MOST_BYTES, "each step looks at all of them, which would take ever longer"
        return {
            "bytes held": held_now,
            "bytes in files": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
            "threads": threading.active_count(),
            "descriptors": psutil.Process().num_fds(),
        }

    return sizes


def check(slopes: dict[str, float], steps: int) -> None:
    assert slopes["bytes held"] < 1 and slopes["bytes in files"] < 1, slopes
    assert slopes["threads"] < 1 / steps and slopes["descriptors"] < 1 / steps, slopes


def slopes_of_a_supervisor(tmp_path: Path, steps: int) -> dict[str, float]:
    content = config("model", run__dir=str(tmp_path)).model_dump_json()
    spec = SupervisorSpec(content, str(tmp_path), ProcessId.own(), "abc", 0, "/", cuda=False)
    watched, recorded = Supervisor(spec, tmp_path / "private"), set[ProcessId]()
    watched._descendants = passing_by()  # type: ignore[method-assign]

    def beat(step: int) -> None:
        nonlocal recorded
        recorded = watched._watch_once(recorded)
        if step % 4 == 0:
            watched._state.publish(heartbeats=step)

    slopes = slopes_over(
        steps, EVERY, beat, sizes_of(lambda: (watched._state.children, watched._state.content), tmp_path)
    )
    assert watched._state.children == recorded == {ProcessId.own()} and (tmp_path / STATE_FILE).is_file()
    return slopes


def test_the_supervisor_forgets_processes_that_have_ended(tmp_path: Path) -> None:
    check(in_own_process(slopes_of_a_supervisor, tmp_path, STEPS), STEPS)


def slopes_of_an_agent(tmp_path: Path, steps: int) -> dict[str, float]:
    chosen, where = config("model", run__dir=str(tmp_path)), launch_directory(tmp_path, "1")
    where.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    agent = NodeLauncher(LaunchSpec("1", chosen.model_dump_json(), str(where), "/", False, ("here",), "train.py", 0), 0)
    agent._start_torchrun = lambda: None  # type: ignore[method-assign]
    processes = agent._processes
    processes.raylet = SimpleNamespace(poll=lambda: None, pid=os.getpid())  # type: ignore[assignment]

    def tick(step: int) -> None:
        assert not agent._tick_or_wait() and agent._trouble_since is None

    with mock.patch.object(node_processes, "descendants", passing_by()):
        slopes = slopes_over(
            steps, EVERY, tick, sizes_of(lambda: (processes.children, processes.raylet_children), tmp_path)
        )
    assert processes.children == processes.raylet_children == {ProcessId.own()}
    return slopes


def test_the_agent_of_a_node_forgets_processes_that_have_ended(tmp_path: Path) -> None:
    check(in_own_process(slopes_of_an_agent, tmp_path, STEPS), STEPS)
