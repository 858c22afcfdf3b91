"""Shared, expensive things: worlds of ranks (one per size, kept for the whole session)."""

import asyncio
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of the address of each connection to a store: 10 s each where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import hypothesis
import pytest

from megarl.sandbox.availability import sandbox_problem
from tests.support.attacks.escape_attempts import SHOWN
from tests.support.checkout import ROOT
from tests.support.repository.needs import SANDBOX, need
from tests.support.waiting import end_other_tasks
from tests.support.worlds.world import Starter, World

# Deadlines of single examples would fail at random on a busy machine. make nightly-properties takes the full profile.
hypothesis.settings.register_profile("full", deadline=None, max_examples=200)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30)
hypothesis.settings.load_profile("ci")

BOUND_S = 240.0  # of a coroutine; in a time of its own, what waits in vain reaches it at once
LONG_S = 1800  # of a whole run; the timeout of pyproject.toml holds for the other tests

# The files of each suite that take longest, longest first: one of them begun last would leave the other worker idle.
LONG_FILES = (
    "tests/jobs/test_slurm.py",
    "tests/jobs/test_hosts.py",
    "tests/jobs/test_local.py",
    "tests/system/test_train.py",
    "tests/system/test_resumed_runs.py",
    "tests/system/test_modes.py",
    "tests/system/test_recipe_twins.py",
    "tests/system/test_agents.py",
    "tests/gateway/test_real_pool.py",
    "tests/weights/receive/test_engine.py",
    "tests/weights/send/test_sender.py",
    "tests/weights/send/test_sync_attempt.py",
    "tests/trainer/test_layouts.py",
    "tests/cluster/test_running_pool.py",
    "tests/checkpoint/save/test_checkpointer.py",
    "tests/trainer/test_policy.py",
    "tests/rewards/test_worker_pool.py",
    "tests/cli/test_launch.py",
    "tests/checkpoint/convert/test_layouts.py",
    "tests/sandbox/test_runner.py",
    "tests/queue/test_transfer.py",
    "tests/platforms/test_patches.py",
    "tests/cli/doctor/test_examine.py",
    "tests/weights/send/test_sender_on_ranks.py",
    "tests/run/step/test_step.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whole runs and slow tests more time, and put the files that take longest first, as xdist hands them out."""
    for item in items:
        inside = item.path.relative_to(ROOT).parts
        if item.get_closest_marker("slow") or inside[1] in ("system", "jobs"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    ranks = {ROOT / name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, within BOUND_S."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await pyfuncitem.obj(**given)
        await end_other_tasks()  # what these begin at their end would be in a loop that is closed

    asyncio.run(bounded())
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that runs programs in the sandbox where there is none, with the reason."""
    if item.get_closest_marker("sandbox"):
        need(SANDBOX, sandbox_problem() or "")


def pytest_collection_finish() -> None:
    """Take all imported modules out of garbage collection: vLLM collects after each model, 0.5 s each with them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Undo it: some libraries report objects as leaked that are still there when the process ends."""
    gc.unfreeze()
    gc.collect()  # an engine that ended in a test must be freed while vLLM's modules are still there


@pytest.fixture(autouse=True)
def end_of_events() -> Iterator[None]:
    """Close the events of a part that a test has made in this process, and that would end with a process of its own."""
    yield
    if (events := sys.modules.get("megarl.telemetry.trace.events")) is not None:
        events.close_events()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights and a tokenizer, not to be changed."""
    from tests.support.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], World]]:
    """`world(2)` is the session's world of two ranks; one that died is started again."""
    starter = Starter()
    worlds: dict[int, World] = {}

    def get(size: int) -> World:
        if size not in worlds or not worlds[size].alive:
            worlds[size] = World(size, starter)
        return worlds[size]

    yield get
    for each in worlds.values():
        each.close()
    starter.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many escapes from the sandbox were shown in both halves."""
    properties = [each for report in terminalreporter.getreports("passed") for each in report.user_properties]
    if shown := {value for name, value in properties if name == SHOWN}:
        terminalreporter.write_line(f"{len(shown)} attempts {SHOWN}")
