"""A controller whose groups run in two workers: batches, failures, trainers that start again, publications."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import BatchNotReady, RolloutError
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.trajectory_builder import trajectory
from megarl.rollout.fleet.engine_pool import RequestCoalescer
from megarl.rollout.resume.group_progress import FrozenLoop
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile
from megarl.rollout.resume.journal_records import read_head
from megarl.rollout.workers.messages import Frozen, LoopEnd, SentFailure
from tests.support.engines.fake_replicas import FakeReplica, fleet_of
from tests.support.rollout.fake_rollout import FakeRewards, FakeSource, LocalController, local_controller
from tests.support.rollout.fake_workers import Crew
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
WAIT_S = 10.0
CONFIG = config_of("model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, rollout={"agent_workers": 2})


def with_workers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, loop: AgentLoop | None = None, config: Config = CONFIG
) -> tuple[LocalController, Crew]:
    """A controller on stand-ins whose loops run in two workers, which are not started yet."""
    local = local_controller(config, directory, monkeypatch, loop)
    controller: Any = local.controller
    runner = GroupRunner(config, loop or SingleTurn(), controller._source, None, local.rewards)
    crew = Crew(config, runner)
    controller._writer = controller._queue = local.queue = crew.queue
    controller._workers = crew.pool
    controller._join()
    return local, crew


async def test_a_reward_function_that_fails_too_often_in_a_worker_ends_the_run_with_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, crew = with_workers(tmp_path, monkeypatch)
    message = "the reward function 'judge:f' failed for 16 of the latest 16 samples; LookupError: no key"
    local.rewards.failure = RewardPoolError(message)
    await crew.pool.start()
    await local.controller.set_version(0)
    with pytest.raises(RolloutError) as caught:
        await local.controller.wait_batch(0, WAIT_S)
    assert str(caught.value) == message
    await crew.pool.close()


async def test_a_batch_that_does_not_come_says_which_worker_has_how_many_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, crew = with_workers(tmp_path, monkeypatch)
    local.fleet.held = {0, 1, 2}
    await crew.pool.start()
    await local.controller.set_version(0)
    with pytest.raises(BatchNotReady, match="agent worker 0 has 2 groups; agent worker 1 has 1 groups"):
        await local.controller.wait_batch(0, 0.1)
    await local.controller._tasks.drop()
    await crew.pool.close()


async def test_what_comes_late_from_before_a_trainer_began_again_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the workers have said of the history before is said again, and ends of other kinds alongside it."""
    local, crew = with_workers(tmp_path, monkeypatch)
    controller = local.controller
    await crew.pool.start()
    await controller.set_version(0)
    await controller.wait_batch(0, WAIT_S)
    local.fleet.held = set(range(GROUPS, 2 * GROUPS))
    await controller.commit(0, trained=GROUPS, filtered=0, dropped_stale=0, failed=0)
    await controller.set_version(1)
    while len(crew.pool._runs) < GROUPS:
        await asyncio.sleep(0.01)
    local.fleet.held = {0, 1, 2}
    await controller.begin(None)
    assert not local.queue.rows and not crew.pool._runs
    await controller.set_version(0)
    while len(controller._running.progress) < GROUPS:
        await asyncio.sleep(0.01)
    before = {group: progress.begun() for group, progress in controller._running.progress.items()}
    reported = [message for worker in crew.made for _, messages, _ in worker.kept_reports for message in messages]
    ended = next(message for message in reported if isinstance(message, LoopEnd))
    runs = range(2 * GROUPS)  # those of the history before
    for run in runs:
        reported += [
            replace(ended, run=run),
            Frozen(run, 0, FrozenLoop("stale", version=99)),
            LoopEnd(run, SentFailure("RolloutError", "stale"), ended.stats),
        ]
    old = [message for message in reported if message.run in runs]
    counters, stats = await controller.counters(), repr(controller._running.stats)
    await crew.pool._receive(old)
    await asyncio.sleep(0.1)
    assert await controller.counters() == counters and not local.queue.rows
    assert repr(controller._running.stats) == stats
    assert {group: each.begun() for group, each in controller._running.progress.items()} == before
    await controller._tasks.drop()
    await crew.pool.close()


class TwoTurns:
    """Asks twice; `between` is awaited before the second request."""

    def __init__(self, between: Callable[[], Awaitable[object]]) -> None:
        self.between = between

    async def run(self, ctx: AgentContext) -> Trajectory:
        await ctx.generate(ctx.prompt.ids)
        await self.between()
        result = await ctx.generate([*ctx.prompt.ids, 3])
        outcome = await ctx.judge(result)
        assert outcome is not None
        ids = result.response_ids
        return Trajectory(
            ctx.group_id, ctx.sample_index, ctx.prompt.ids, ids, [0.0] * len(ids), result.versions, "stop",
            outcome.score,
        )  # fmt: skip


async def test_a_drain_holds_back_the_requests_of_workers_until_the_publication_is_over() -> None:
    """The first turn has ended, the second one is asked for during the drain, of either worker's group."""
    replica = FakeReplica(4)
    fleet = fleet_of({0: replica})
    drained, waiting = asyncio.Event(), []

    async def between() -> None:
        waiting.append(1)
        await drained.wait()

    generate = RequestCoalescer(fleet).generate
    crew = Crew(CONFIG, GroupRunner(CONFIG, TwoTurns(between), FakeSource(), generate, FakeRewards()))
    await crew.pool.start()
    running = [asyncio.ensure_future(crew.run(group)) for group in range(2)]
    while len(waiting) < 2 * SAMPLES:
        await asyncio.sleep(0.01)
    await fleet.drain(5.0)
    drained.set()
    await asyncio.sleep(0.2)
    assert len(replica.served) == 2 and not any(each.done() for each in running), "the second turns are held back"
    fleet.admit_joining()  # as `set_version` does
    ends = await asyncio.gather(*running)
    assert len(replica.served) == 2 + 2 * SAMPLES and [len(rows) for rows in ends] == [SAMPLES] * 2
    assert {name for served in replica.served for name in served} == {
        f"p-{group}-{sample}-{turn}" for group in range(2) for sample in range(SAMPLES) for turn in range(2)
    }
    await crew.pool.close()


@dataclass
class Known:
    """The state of `Remembers`."""

    turns: int


class Remembers:
    """Freezes a state after the first turn; waits there if `waits`. `resumed`: the samples that had a state."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self.frozen: list[str] = []
        self.resumed: list[str] = []

    async def run(self, ctx: AgentContext) -> Trajectory:
        state = ctx.frozen(Known)
        name = f"{ctx.group_id}:{ctx.sample_index}"
        if state is None:
            await ctx.generate(ctx.prompt.ids)
            ctx.freeze(Known(1))
            self.frozen.append(name)
        else:
            self.resumed.append(name)
        if self.waits:
            await asyncio.Event().wait()
        first = ctx.finished(0)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, first, await ctx.judge(first))


def states(path: Path) -> set[tuple[int, int]]:
    """The samples whose state is in a journal."""
    found = set()
    for record in JournalFile(path).read():
        if (head := read_head(record))["kind"] == "unfinished":
            found |= {(head["group"], sample) for sample, loop in head["loops"] if "turns" in loop["state"]}
    return found


async def test_the_journal_has_the_states_of_loops_in_workers_and_the_next_controller_s_go_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update={"journal_s": 0.05})})
    before = Remembers(waits=True)
    first, crew = with_workers(tmp_path, monkeypatch, before, config)
    names = [f"{group}:{sample}" for group in range(GROUPS) for sample in range(SAMPLES)]
    await crew.pool.start()
    await first.controller.begin(None)
    await first.controller.set_version(0)
    path = tmp_path / JOURNAL_FILE
    while not path.exists() or len(states(path)) < len(names):
        await asyncio.sleep(0.05)
    await first.controller._tasks.drop()
    await crew.pool.close()
    assert sorted(before.frozen) == names
    after = Remembers(waits=False)
    second, crew = with_workers(tmp_path, monkeypatch, after, config)
    await crew.pool.start()
    await second.controller.begin(None)
    await second.controller.set_version(0)
    await second.controller.wait_batch(0, WAIT_S)
    assert sorted(after.resumed) == names and not after.frozen
    assert not second.fleet.sent, "no engine is asked for what there was"
    assert sorted(second.queue.rows) == names
    await second.controller._tasks.drop()
    await crew.pool.close()
