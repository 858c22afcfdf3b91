"""Twenty thousand steps of a controller: nothing that it holds, opens or writes grows with their number."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from megarl.rollout.orchestrator import prompt_groups
from megarl.rollout.orchestrator.prompt_groups import FailurePolicy
from megarl.rollout.resume.journal import JOURNAL_FILE
from tests.support.measures.growth import growth_per_step, held_bytes
from tests.support.rollout.fake_rollout import LocalController, local_controller
from tests.support.trainer.configs import config as config_of

pytestmark = pytest.mark.slow

STEPS, MEASURED_EVERY = 20_000, 500
GROUPS, SAMPLES = 2, 2
EVENTS = "events"  # the folder
# Bytes per step. A list with one more entry per step grows by 8, without what the entry refers to. Open groups and
# the journal are a different share of their interval at each measurement: 20 kB of noise, a slope of up to 1.5.
GROWTH = 4.0
REAL_TIME = True  # what is kept for some seconds would not leave


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """In memory, where it can be: a file is replaced in every step, for which a disk needs longer than for the step."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@pytest.fixture
def local(run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> LocalController:
    caplog.set_level(logging.ERROR, "megarl")  # thousands of warnings of groups that fail, with their tracebacks
    config = config_of(
        "model",
        run={"steps": STEPS},
        batch={"groups": GROUPS, "samples_per_group": SAMPLES},
        admission={"mode": "async"},
        rollout={"journal_s": 0.05},
    )
    # The groups that fail here may end before the others of their window: in a row, which would end the run.
    monkeypatch.setattr(prompt_groups, "FailurePolicy", lambda policy, limit: FailurePolicy(policy, GROUPS * STEPS))
    return local_controller(config, run_dir, monkeypatch)


def forget_calls(local: LocalController) -> None:
    """Empty what the fakes remember of their calls."""
    source: Any = local.controller._source
    local.fleet.sent.clear()
    local.queue.groups.clear()
    source.finished.clear()
    source.committed.clear()


async def take_step(local: LocalController, step: int) -> None:
    """Make the calls of one step of the training loop. Every fifth group fails."""
    controller = local.controller
    local.fleet.failures = {
        group: ConnectionError("refused") for group in range(2 * step, 2 * step + 8) if not group % 7
    }
    await controller.announce(step)
    await controller.set_version(step)
    await controller.admit(step)
    batch = await controller.wait_batch(step, 5.0)
    failed = sum(local.queue.rows[f"{group}:0"].status == "failed" for group in batch.groups)
    await controller.commit(step, trained=GROUPS - failed, filtered=0, dropped_stale=0, failed=failed)
    if step % 100 == 99:
        await controller.state_dict()
        await controller.saved(step + 1)
    forget_calls(local)


def size_of(path: Path) -> int:
    """The bytes of a file; 0 of a directory, and of a file that has just taken the place of another one by a rename."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def sizes(local: LocalController, directory: Path) -> dict[str, float]:
    """Return what could grow, by name."""
    process = psutil.Process()
    return {
        "bytes held by the controller": held_bytes(vars(local.controller)),
        # Without events, which rotate (tests/telemetry/trace/test_writer.py).
        "bytes in files": sum(size_of(path) for path in directory.rglob("*") if path.parent.name != EVENTS),
        "bytes in the journal": size_of(directory / JOURNAL_FILE),
        "files": sum(1 for _ in directory.rglob("*")),
        "threads": threading.active_count(),
        "descriptors": process.num_fds(),
        "tasks": len(asyncio.all_tasks()),
    }


async def test_nothing_grows(local: LocalController, run_dir: Path) -> None:
    source: Any = local.controller._source
    draw = source.draw
    source.draw = lambda group: draw(group % 5)
    found: list[dict[str, float]] = []
    await local.controller.begin(None)  # from here on the journal is written
    for step in range(STEPS):
        await take_step(local, step)
        if step % MEASURED_EVERY == 0:
            found.append(sizes(local, run_dir))
    assert local.controller._admission.counters.failed > STEPS / 10, "failed groups are part of it"
    await local.controller.shutdown()
    later = found[2:]  # the first steps fill what has a fixed size
    steps = [number * MEASURED_EVERY for number in range(len(later))]
    slopes = {name: growth_per_step(steps, [each[name] for each in later]) for name in later[0]}
    assert max(each["bytes in the journal"] for each in later) > 0, "the journal is part of it"
    assert all(slopes[name] < GROWTH for name in slopes if name.startswith("bytes")), slopes
    # A pool of threads may take some more of its few at any time; one per 2,000 steps is no such thing.
    assert all(slopes[name] < 10 / STEPS for name in ("files", "threads", "descriptors", "tasks")), slopes
