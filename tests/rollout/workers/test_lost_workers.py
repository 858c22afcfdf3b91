"""A worker that dies at any point costs nothing but time: another one comes to the same rows, and doubles no call."""

import asyncio
import json
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import NoWorkerLeft, RolloutError
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents import loop_run
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.resume.group_progress import INTERRUPTED
from megarl.rollout.workers import worker_pool
from tests.support.agents.frozen_agents import GROUP, TURNS, interrupted_books, undisturbed
from tests.support.agents.scripted_agents import Counter, KeepingRewards, ScriptedBatcher, agent_runner, toolbox_of
from tests.support.rollout.fake_rollout import FakeBatcher, FakeRewards, FakeSource
from tests.support.rollout.fake_workers import Crew, WorkerQueue, rows_of
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

EXPECTED, _ = undisturbed()


class Scene:
    """The group of `frozen_agents`, run by two workers; everything that waits passes `point`."""

    def __init__(self, at: int = -1, rpc_s: float = 5.0) -> None:
        self.config: Config = config_of(
            "model",
            batch={"groups": 1, "samples_per_group": 2},
            rollout={"agent_workers": 2},
            timeouts={"rpc_s": rpc_s},
        )
        self.at, self.seen = at, 0
        self.add, self.book = Counter("add"), Counter("book", idempotent=False)
        self.rewards, self.queue = KeepingRewards(), WorkerQueue()
        self.add.hold = self.book.hold = self.queue.hold = self.point
        judge = self.rewards.score

        async def score(*args: Any) -> Any:
            await self.point()
            return await judge(*args)

        self.rewards.score = score  # type: ignore[method-assign]
        self.batcher = ScriptedBatcher(TURNS, pause=self.point)
        self.runner: GroupRunner = agent_runner(
            self.config, ToolAgent(), toolbox_of(self.add, self.book), self.batcher, self.rewards, 1024
        )
        self.crew = Crew(self.config, self.runner, self.queue)

    async def point(self) -> None:
        """Something waits here. At point `at` the worker that has the group dies."""
        self.seen += 1
        if self.seen - 1 == self.at:
            self.crew.starts_of(GROUP)[-1][0].die()
        await asyncio.sleep(0)

    async def run(self) -> list[Trajectory]:
        """Run the group to its rows in the queue."""
        await self.crew.pool.start()
        try:
            await self.crew.run(GROUP)
            return rows_of(self.queue, GROUP)
        finally:
            await self.crew.pool.close()

    def outcome(self) -> list[Trajectory]:
        return asyncio.run(asyncio.wait_for(self.run(), 30))


def contents(rows: list[Trajectory]) -> Any:
    return json.loads(json.dumps([asdict(row) for row in rows]))


def undisturbed() -> int:
    scene = Scene()
    assert contents(scene.outcome()) == EXPECTED["rows"]
    assert len(scene.crew.starts_of(GROUP)) == 1 and scene.runner.groups.progress == {}
    return scene.seen


POINTS = undisturbed()


def test_workers_make_the_rows_that_the_controller_makes_and_measure_the_same() -> None:
    scene = Scene()
    scene.outcome()
    stats = scene.runner.groups.stats
    assert (stats.turns, stats.tool_calls, len(stats.generate_seconds)) == ([4, 4], 8, 8)
    assert scene.crew.pool.take_metrics()["rollout/workers_lost"] == 0 and len(stats.reward_seconds) == 2


def test_later_turns_of_a_worker_are_sent_to_the_replica_that_has_their_beginning() -> None:
    scene = Scene()
    scene.outcome()
    asked = {}
    for request, prefix, near in scene.batcher.asked:
        _, group, sample, turn = request.request_id.split("-")
        asked[int(group), int(sample), int(turn)] = (prefix, near)
    assert asked == {
        (GROUP, sample, turn): ((GROUP, sample), 1) if turn else (GROUP, None)
        for sample in range(2)
        for turn in range(len(TURNS))
    }


@pytest.mark.parametrize("at", range(POINTS))
def test_a_worker_dies_at_any_point(at: int) -> None:
    scene = Scene(at)
    rows = scene.outcome()
    starts = scene.crew.starts_of(GROUP)
    assert scene.crew.pool.lost == (at < POINTS - 1), "at the last point the rows are here"
    interrupted = interrupted_books(starts[-1][1].kept) if len(starts) > 1 else 0
    assert sorted(scene.book.calls, key=str) == sorted(EXPECTED["book"], key=str), "none is doubled"
    assert {str(call) for call in scene.add.calls} == {str(call) for call in EXPECTED["add"]}
    texts = [turn.text for judged in scene.rewards.judged[-2:] for turn in judged.turns]
    assert texts.count(INTERRUPTED) == interrupted
    if not interrupted:
        assert contents(rows) == EXPECTED["rows"]
    assert [len(group) for group in scene.queue.groups] == [2], "once in the queue"
    asked = [request.request_id for request, *_ in scene.batcher.asked]
    assert len(asked) == len(set(asked)) == 8, "no engine is asked twice for one name"
    assert not any(scene.crew.pool._loops.values()), "a worker counts as busy with loops that it has not"


def test_a_worker_that_does_not_answer_in_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.transport.link.POLL_S", 0.1)
    scene = Scene(rpc_s=0.5)

    async def silence() -> None:
        scene.crew.made[0].silent = True
        await asyncio.sleep(0)

    scene.batcher.pause = silence  # while an engine works on its first requests
    assert contents(scene.outcome()) == EXPECTED["rows"]
    assert scene.crew.pool.lost == scene.crew.pool.redone == 1


def test_a_group_that_takes_workers_with_it_fails() -> None:
    scene = Scene()

    async def kill() -> None:
        scene.crew.starts_of(GROUP)[-1][0].die()
        await asyncio.Event().wait()

    scene.add.hold = kill
    with pytest.raises(
        RolloutError, match=r"5 agent workers were lost with group 5; the last: agent worker . has failed"
    ):
        scene.outcome()
    assert scene.crew.pool.lost == 5 and scene.runner.groups.progress == {}


def test_the_group_fails_if_no_worker_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "RETRY_S", 0.01)
    scene = Scene()

    async def kill_all() -> None:
        scene.crew.refuses = True
        for worker in scene.crew.made:
            worker.die()
        await asyncio.Event().wait()

    scene.add.hold = kill_all
    with pytest.raises(NoWorkerLeft, match="no agent worker is left"):
        scene.outcome()
    assert "no agent worker could be started in its place in 3 attempts" in scene.crew.notices[-1]


class DiesTwice:
    """Notes the seconds until its deadline. Its first two workers die 700 s after they were given the group."""

    def __init__(self) -> None:
        self.now = 5000.0  # on the controller's clock, which is not that of the workers
        self.left: list[float] = []
        self.crew: Crew | None = None

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.sample_index == 0:
            assert ctx.deadline is not None and self.crew is not None
            self.left.append(ctx.deadline.at - time.monotonic())
            if len(self.left) <= 2:
                self.now += 700.0
                self.crew.starts_of(GROUP)[-1][0].die()
                await asyncio.Event().wait()
        return await SingleTurn().run(ctx)


async def test_the_deadline_of_a_group_counts_from_its_start_in_the_first_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = DiesTwice()
    for module in (worker_pool, loop_run):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: loop.now))
    config = config_of(
        "model",
        batch={"groups": 1, "samples_per_group": 2},
        rollout={"agent_workers": 2, "group_deadline_s": 1000.0},
    )
    parts: list[Any] = [FakeSource(), FakeBatcher().generate, FakeRewards()]
    crew = loop.crew = Crew(config, GroupRunner(config, loop, *parts))
    await crew.pool.start()
    await crew.run(GROUP)
    assert [start.deadline and start.deadline.at for _, start in crew.starts_of(GROUP)] == [1000.0, 300.0, 0.0]
    await crew.pool.close()
    # A worker counts from when it has the message, on a clock that goes on.
    for seen, left in zip(loop.left, [1000.0, 300.0, 0.0], strict=True):
        assert left - 60.0 < seen <= left
