"""Agent loops that have not ended within the grace of their group's deadline."""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import RolloutError
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine import continuation
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.fleet.engine_pool import RequestCoalescer
from megarl.rollout.transport import background
from tests.support.engines.fake_replicas import FakeReplica, fleet_of
from tests.support.rollout.fake_rollout import FakeBatcher, FakeRewards, FakeSource, local_controller
from tests.support.rollout.fake_workers import Crew
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
DEADLINE_S = 0.2
HELD_S = 20.0  # nothing here takes a tenth of it
LATE = r"the loop tests\.rollout\.test_late_loops:\w+ had not ended in all samples of group 0 0\.05 s after the "
LATE += r"group's deadline of 0\.2 s \(rollout\.group_deadline_s\)"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "GRACE_S", 0.05)


def config_with(policy: str, **rollout: Any) -> Config:
    return config_of(
        "model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, admission={"mode": "one_step_off"},
        rollout={"group_deadline_s": DEADLINE_S, "on_group_deadline": policy, **rollout},
    )  # fmt: skip


def runner_of(config: Config, loop: AgentLoop, batcher: Any = None, rewards: Any = None) -> GroupRunner:
    source: Any = FakeSource()
    return GroupRunner(config, loop, source, (batcher or FakeBatcher()).generate, rewards or FakeRewards())


def results_of(running: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(HELD_S):
            return await running

    return asyncio.run(bounded())


async def past_the_deadline() -> None:
    """Wait until a group that begins now would be over its deadline, and its loops' grace."""
    await asyncio.sleep(2 * DEADLINE_S)


class Waits:
    """Waits forever in some samples of group 0, as for a server of the user's own; the others answer."""

    def __init__(self, *samples: int) -> None:
        self.samples, self.waiting, self.cancelled = samples, 0, 0

    async def run(self, ctx: AgentContext) -> Trajectory:
        row = await SingleTurn().run(ctx)
        if ctx.group_id == 0 and ctx.sample_index in self.samples:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)  # it closes what it has opened
                self.cancelled += 1
        return row


@given(bound=st.floats(0.1, 1e5), share=st.floats(0.001, 0.999))
def test_a_group_ends_before_a_trainer_that_waits_for_it_gives_up(bound: float, share: float) -> None:
    """So it is too if its deadline is close to `timeouts.generate_s`."""
    config = config_of("model", rollout__group_deadline_s=share * bound, timeouts__generate_s=bound)
    deadline = GroupDeadline.of(config, 0.0)
    assert deadline is not None and deadline.grace_s > 0 and deadline.at + deadline.grace_s < bound


@pytest.mark.parametrize("policy", ["cut", "fail"])
@pytest.mark.parametrize("samples", [(1,), (0, 1)], ids=str)
def test_a_loop_that_waits_forever_holds_the_trainer_to_its_group_s_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, samples: tuple[int, ...]
) -> None:
    """The second step is the last that may train the group, so it waits for it. Its finished sample fails with it."""
    loop = Waits(*samples)
    local = local_controller(config_with(policy), tmp_path, monkeypatch, loop)
    found: list[Trajectory] = []

    async def run() -> None:
        for step in range(2):
            await local.controller.set_version(step)
            batch = await local.controller.wait_batch(step, HELD_S)
            rows = [local.queue.rows[key] for key in batch.keys]
            found.extend(row for row in rows if row.group_id == 0)
            failed = len({row.group_id for row in rows if row.status == "failed"})
            ends = {"trained": GROUPS - failed, "filtered": 0, "dropped_stale": 0, "failed": failed}
            assert (await local.controller.commit(step, **ends)).balanced
            lengths = [batch.timings.get("rollout/failed_length_max", 0.0)]
            assert max(lengths) > 0 or not failed, "the lengths of the group vanish"
        assert 0 not in local.controller._running.progress and local.controller._groups.admission.counters.failed == 1
        await local.controller.shutdown()

    asyncio.run(run())
    assert loop.cancelled == len(samples)
    assert [row.status for row in found] == ["failed"] * SAMPLES
    assert all(re.match(LATE, row.failure) for row in found), found[0].failure


@pytest.mark.parametrize("policy", ["cut", "fail"])
async def test_a_loop_that_waits_forever_in_a_worker_fails_its_group_at_the_deadline(policy: str) -> None:
    config, loop = config_with(policy, agent_workers=1), Waits(1)
    runner = runner_of(config, loop, RequestCoalescer(fleet_of({0: FakeReplica(4)})))
    crew = Crew(config, runner)
    await crew.pool.start()
    with pytest.raises(RolloutError, match=LATE):
        await crew.run(0)
    assert loop.cancelled == 1 and max(runner.groups.stats.failed_lengths) > 0 and not runner.groups.progress
    assert not crew.pool._loops[0] and not crew.made[0].loops.under_way(), "it has no place any more"
    assert len(await crew.run(1)) == SAMPLES
    await crew.pool.close()


class WaitsFor:
    """Answers, and waits for something before it ends."""

    def __init__(self, ends: Callable[[AgentContext], Awaitable[object]]) -> None:
        self.ends = ends

    async def run(self, ctx: AgentContext) -> Trajectory:
        row = await SingleTurn().run(ctx)
        await self.ends(ctx)
        return row


@pytest.mark.parametrize("policy", ["cut", "fail"])
def test_a_loop_that_ends_within_the_grace_is_trained(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(continuation, "GRACE_S", HELD_S)

    async def ends(ctx: AgentContext) -> None:
        assert ctx.deadline is not None
        await asyncio.sleep(ctx.deadline.at + 0.05 - time.monotonic())

    rows = results_of(runner_of(config_with(policy), WaitsFor(ends)).run(0))
    assert [row.status for row in rows] == ["ok"] * SAMPLES


def test_a_group_without_a_deadline_is_not_ended() -> None:
    rows = results_of(runner_of(config_with("finish"), WaitsFor(lambda ctx: past_the_deadline())).run(0))
    assert [row.status for row in rows] == ["ok"] * SAMPLES


class Ignores:
    """Goes on in sample 1 of group 0 however often it is cancelled; sample 0 ends, or fails."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.end = fails, asyncio.Event()

    async def run(self, ctx: AgentContext) -> Trajectory:
        while ctx.sample_index == 1 and not self.end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.end.wait()
        if self.fails:
            raise ConnectionError("the tool is gone")
        return await SingleTurn().run(ctx)


@pytest.mark.parametrize("end", ["deadline", "failure", "cancellation"])
async def test_a_group_ends_whose_loop_ignores_that_it_is_cancelled(end: str) -> None:
    loop = Ignores(end == "failure")
    runner = runner_of(config_with("cut", group_deadline_s=DEADLINE_S if end == "deadline" else HELD_S), loop)
    running = asyncio.ensure_future(runner.run(0))
    if end == "cancellation":
        await asyncio.sleep(0.01)
        await background.cancel_all([running], "groups")
        assert running.cancelled()
    else:
        with pytest.raises((RolloutError, ConnectionError), match=LATE if end == "deadline" else "the tool is gone"):
            await running
    assert not runner.groups.progress
    loop.end.set()


async def test_loops_have_ended_when_their_group_is_cancelled() -> None:
    """So it is when a trainer starts again: what it drops must not write any more."""
    loop = Waits(0, 1)
    runner = runner_of(config_with("cut", group_deadline_s=HELD_S), loop)
    running = asyncio.ensure_future(runner.run(0))
    while loop.waiting < SAMPLES:
        await asyncio.sleep(0)
    await background.cancel_all([running], "groups")
    assert running.cancelled() and loop.cancelled == SAMPLES and not runner.groups.progress
