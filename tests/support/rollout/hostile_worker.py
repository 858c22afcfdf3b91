"""An agent worker in a process of its own whose loops flood: `python -m tests.support.rollout.hostile_worker DIR`.

It runs two groups, in which the second sample misbehaves, and prints what came of that as one JSON object.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil

from megarl.common.process import output
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.tasks.prompts import PromptSource
from megarl.rollout.workers.agent_worker import AgentWorker, WorkerSpec
from megarl.rollout.workers.worker_pool import WorkerPool
from tests.support.engines.fake_replicas import Method
from tests.support.runs.run import tiny_config

GROUPS = (3, 4)
LOG_BYTES = 1 << 20  # after which the worker's log is begun again
LINE, LINES = "x" * 100_000, 100  # of a flood: ten times as much
ENDS_S = 60.0  # what has been killed takes a moment to end; a child that waits would stay


class Hostile(SingleTurn):
    """A loop whose second sample floods the worker's output."""

    async def run(self, ctx: AgentContext) -> Any:
        """Return the row of one response."""
        row = await super().run(ctx)
        if ctx.sample_index == 1:
            for _ in range(LINES):
                print(LINE)
        return row


class Digits:
    """Engines that answer every request with a number, after a moment in which others are asked too."""

    def __init__(self, tokenizer: Any, stop: int) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.asked: list[str] = []

    async def generate(self, request: GenerateRequest, *args: Any, **options: Any) -> GenerateResult:
        """Answer a request."""
        self.asked.append(request.request_id)
        await asyncio.sleep(0.02)
        ids = [*self.tokenizer("42", add_special_tokens=False)["input_ids"], self.stop]
        return GenerateResult(
            request.request_id, ids, [-0.5] * len(ids), (VersionSpan(0, 0, len(ids)),), "stop", 0, 0.1
        )


async def run(config: Config, directory: Path) -> dict[str, Any]:
    """Run the groups in the worker, and return what came of them and what the engines were asked."""
    source = await asyncio.to_thread(PromptSource, config)
    engines = Digits(source.tokenizer, source.stop_token_ids[0])
    spec = ReplicaSpec(config.model_dump_json(), str(directory), "run", cuda=False, max_model_len=64, supervisor=None)
    worker = AgentWorker(WorkerSpec(spec, 0))
    await worker.start()

    async def start(index: int) -> Any:
        names: Sequence[str] = ("give", "take", "drop", "shutdown")
        return SimpleNamespace(**{name: Method(getattr(worker, name)) for name in names})

    unused = lambda actor: None  # noqa: E731
    workers = WorkerPool(1, config.timeouts, start=start, end=unused, notify=unused)
    await workers.start()
    groups = RunningGroups(config, source, engines.generate, "run.0", in_workers=True)
    ended = await asyncio.gather(*(groups.run(group, None, workers.run_group) for group in GROUPS))
    rows = [[row.group_id, row.sample_index, row.status, row.reward] for group in ended for row in group]
    await workers.close()
    return {"rows": rows, "asked": sorted(engines.asked), "lost": workers.lost}


def living() -> list[list[str]]:
    """Return the commands of the processes below this one."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # also that of a zombie
            if each.status() != "zombie":
                found.append(each.cmdline())
    return found


def main() -> None:
    """Run the worker, and print what came of it."""
    directory, reported = Path(sys.argv[1]), os.dup(1)
    tree = tiny_config(directory)
    tree["agent"] = {"loop": "tests.support.rollout.hostile_worker:Hostile"}
    tree["rollout"] |= {"agent_workers": 1}
    with mock.patch.object(output, "RotatingLog", partial(output.RotatingLog, limit=LOG_BYTES)):
        result = asyncio.run(asyncio.wait_for(run(config_from_tree(tree), directory), 480))
    left = living()
    deadline = time.monotonic() + ENDS_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = living()
    os.write(reported, (json.dumps(result | {"left": left, "pid": os.getpid()}) + "\n").encode())


if __name__ == "__main__":
    main()
