"""Agent loops that have not ended at their group's deadline, and wait for something of their own that nobody bounds."""

from __future__ import annotations

import asyncio
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
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rollout import background, group_deadline
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.single_turn import SingleTurn
from megarl.rollout.batcher import Batcher
from megarl.rollout.group_deadline import GroupDeadline, OwnTime
from megarl.rollout.group_runner import GroupRunner, SampleContext
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.to_trajectory import failed_trajectory
from tests.support.configs import config as config_of
from tests.support.fake_replicas import FakeReplica, fleet_of
from tests.support.fake_rollout import FakeBatcher, FakeRewards, FakeSource, local_controller
from tests.support.fake_workers import Crew, WorkerQueue
from tests.support.scripted_agents import Counter, toolbox_of

GROUPS, SAMPLES = 3, 2
DEADLINE_S = 0.2
HELD_S = 20.0  # nothing here takes a tenth of it
LATE = r"the loop tests\.rollout\.test_late_loops:\w+ had not ended in {} of 2 samples of group 0 \({}\): it waited "
LATE += r"0\.02 s after the group's deadline of 0\.2 s \(rollout\.group_deadline_s\) for something that is no engine"


def config_with(policy: str, **rollout: Any) -> Config:
    return config_of(
        "model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, admission={"mode": "one_step_off"},
        rollout={"group_deadline_s": DEADLINE_S, "on_group_deadline": policy, **rollout},
    )  # fmt: skip


def runner_of(config: Config, loop: AgentLoop, batcher: Any = None, rewards: Any = None) -> GroupRunner:
    source: Any = FakeSource()
    toolboxes = {"": toolbox_of(Counter(hold=past_the_deadline))}
    return GroupRunner(
        config, loop, source, batcher or FakeBatcher(), rewards or FakeRewards(), partition="p", toolboxes=toolboxes
    )


def results_of(running: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(HELD_S):
            return await running

    return asyncio.run(bounded())


async def past_the_deadline() -> None:
    """Wait until a group that begins now is over its deadline, and its loops' grace."""
    await asyncio.sleep(2 * DEADLINE_S)


class Waits:
    """Waits for ever in some samples of group 0, as for a server of the user's own; the others answer."""

    def __init__(self, *samples: int) -> None:
        self.samples, self.cancelled = samples, 0

    async def run(self, ctx: AgentContext) -> Trajectory:
        row = await SingleTurn().run(ctx)
        if ctx.group_id == 0 and ctx.sample_index in self.samples:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)  # it closes what it has opened
                self.cancelled += 1
        return row


def test_the_grace_is_a_tenth_of_the_group_s_time_and_a_minute_at_most() -> None:
    assert [GroupDeadline(0.0, seconds, "cut").grace_s for seconds in (0.2, 300.0, 1620.0)] == [
        pytest.approx(0.02), 30.0, 60.0
    ]  # fmt: skip


@given(bound=st.floats(0.1, 1e5), share=st.floats(0.001, 0.999))
def test_a_group_ends_before_a_trainer_that_waits_for_it_gives_up(bound: float, share: float) -> None:
    """So it is too if its deadline is close to `timeouts.generate_s`, and a loop ignores its cancellation."""
    config = config_of("model", rollout__group_deadline_s=share * bound, timeouts__generate_s=bound)
    deadline = GroupDeadline.of(config, 0.0)
    assert deadline is not None and deadline.grace_s > 0 and deadline.cancel_s > 0
    assert deadline.at + deadline.grace_s + deadline.cancel_s < bound


def test_a_dropped_group_has_ended_before_its_end_is_an_error() -> None:
    assert GroupDeadline(0.0, 1e6, "cut").cancel_s < background.CANCEL_S


def test_own_time_is_what_follows_the_deadline_outside_of_all_services() -> None:
    own = OwnTime(at=10.0)
    assert own.seconds(9.0) == 0.0
    own.begin_service(8.0)
    own.end_service(9.0)
    assert own.seconds(12.0) == 2.0
    own.begin_service(13.0)
    own.begin_service(14.0)
    own.end_service(15.0)
    assert own.seconds(20.0) == 3.0, "the first service goes on"
    own.end_service(21.0)
    assert own.seconds(22.0) == 4.0


@pytest.mark.parametrize("policy", ["cut", "fail"])
@pytest.mark.parametrize("samples", [(1,), (0, 1)], ids=str)
def test_a_loop_that_waits_for_ever_holds_the_trainer_to_its_group_s_deadline_only(
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
        assert 0 not in local.controller._runner.progress and local.controller._groups.admission.counters.failed == 1
        await local.controller.shutdown()

    asyncio.run(run())
    assert loop.cancelled == len(samples)
    assert [row.status for row in found] == ["failed"] * SAMPLES
    told = LATE.format(len(samples), ", ".join(map(str, samples)))
    assert all(re.match(told, row.failure) for row in found), found[0].failure


@pytest.mark.parametrize("policy", ["cut", "fail"])
def test_a_loop_that_waits_for_ever_in_a_worker_fails_its_group_at_the_deadline(policy: str) -> None:
    config, loop = config_with(policy, agent_workers=1), Waits(1)

    async def scenario() -> None:
        source: Any = FakeSource()
        rewards: Any = FakeRewards()
        runner = GroupRunner(config, loop, source, Batcher(fleet_of({0: FakeReplica(4)})), rewards, partition="p")
        crew = Crew(config, loop, runner, WorkerQueue())
        await crew.groups.start()
        with pytest.raises(RolloutError, match=LATE.format(1, 1)):
            await crew.groups.run(0)
        assert loop.cancelled == 1 and max(runner.stats.failed_lengths) > 0 and not runner.progress
        assert not crew.groups._loops[0] and not crew.made[0].loops.under_way(), "it has no place any more"
        assert (await crew.groups.run(1)).usable
        await crew.groups.close()

    results_of(scenario())


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
    monkeypatch.setattr(group_deadline, "GRACE_SHARE", HELD_S / DEADLINE_S)

    async def ends(ctx: AgentContext) -> None:
        assert ctx.deadline is not None
        await asyncio.sleep(ctx.deadline.at + 0.05 - time.monotonic())

    rows = results_of(runner_of(config_with(policy), WaitsFor(ends)).run(0))
    assert [row.status for row in rows] == ["ok"] * SAMPLES


def test_a_group_without_a_deadline_is_not_ended() -> None:
    rows = results_of(runner_of(config_with("finish"), WaitsFor(lambda ctx: past_the_deadline())).run(0))
    assert [row.status for row in rows] == ["ok"] * SAMPLES


class SlowEngines(FakeBatcher):
    """Answers after the deadline, as an engine that is lost then."""

    async def generate(self, request: GenerateRequest, *args: Any, **options: Any) -> GenerateResult:
        await past_the_deadline()
        return await super().generate(request, *args, **options)


class SlowRewards(FakeRewards):
    """Answers after the deadline."""

    async def score(self, judged: RewardInput, function: int = 0) -> RewardOutcome:
        await past_the_deadline()
        return await super().score(judged, function)


async def no_more(ctx: AgentContext) -> None: ...


async def call(ctx: AgentContext) -> None:
    await ctx.call("add", {"a": 1, "b": 1})


async def call_beside_a_turn(ctx: AgentContext) -> None:
    """The turn ends long before the call does."""
    await asyncio.gather(call(ctx), ctx.generate([1, 2]))


@pytest.mark.parametrize(
    ("batcher", "rewards", "ends"),
    [
        (SlowEngines, FakeRewards, no_more),
        (FakeBatcher, SlowRewards, no_more),
        (FakeBatcher, FakeRewards, call),
        (FakeBatcher, FakeRewards, call_beside_a_turn),
    ],
    ids=["engine", "reward", "tool", "two at once"],
)
def test_the_time_of_engines_rewards_and_tools_is_bounded_by_themselves(batcher: Any, rewards: Any, ends: Any) -> None:
    """A reward may take longer than the grace, and its group is trained all the same."""
    rows = results_of(runner_of(config_with("cut"), WaitsFor(ends), batcher(), rewards()).run(0))
    assert [row.status for row in rows] == ["ok"] * SAMPLES


def test_the_deadline_of_a_group_that_has_begun_elsewhere_is_the_earlier_one() -> None:
    config, started = config_with("cut", group_deadline_s=5.0), time.monotonic()
    with pytest.raises(RolloutError, match=r"waited 0\.5 s after the group's deadline of 5 s"):
        results_of(runner_of(config, Waits(0)).run(0, left_s=0.0))
    assert time.monotonic() - started < 5.0


class Ignores:
    """Goes on waiting when it is cancelled, and asks an engine once it is `released`."""

    def __init__(self) -> None:
        self.released, self.refused = asyncio.Event(), asyncio.Event()

    async def run(self, ctx: AgentContext) -> Trajectory:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        try:
            return await SingleTurn().run(ctx)
        except RolloutError:
            self.refused.set()
            return failed_trajectory(ctx.group_id, ctx.sample_index, "refused")


def test_a_loop_that_ignores_its_cancellation_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_deadline, "CANCEL_S", 0.05)
    batcher = FakeBatcher()
    noted: list[SampleContext] = []

    def note(context: SampleContext) -> None:
        noted.append(context)

    async def scenario() -> None:
        loop = Ignores()
        running = asyncio.ensure_future(runner_of(config_with("fail"), loop, batcher).run(0))
        await asyncio.wait({running}, timeout=HELD_S / 2)
        given_up = running.done()
        monkeypatch.setattr(SampleContext, "note_times", note)
        loop.released.set()
        with pytest.raises(RolloutError, match=LATE.format(2, "0, 1")):
            await running
        assert given_up
        await loop.refused.wait()
        await asyncio.sleep(0.05)

    results_of(scenario())
    assert not batcher.asked, "nothing is sampled for a group that has ended"
    assert not noted, "its times would count for the batch that is made now"


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_dropped_group_whose_loop_ignores_its_cancellation_gets_nothing_any_more(cancellations: int) -> None:
    """The second one comes while the runner waits for the loop: the attempt ends, or the run does."""
    batcher = FakeBatcher()

    async def scenario() -> None:
        loop = Ignores()
        runner = runner_of(config_with("cut", group_deadline_s=HELD_S), loop, batcher)
        running = asyncio.ensure_future(runner.run(0))
        while not runner.progress:
            await asyncio.sleep(0)
        for left in range(cancellations, 0, -1):
            await asyncio.sleep(0.05)
            if left > 1:
                running.cancel()
        await background.cancel_all([running], "groups")
        assert running.cancelled()
        loop.released.set()
        await loop.refused.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_deadline, "CANCEL_S", 0.2)
        results_of(scenario())
    assert not batcher.asked


class FailsBesideOneThatStays:
    """Fails in sample 0, while sample 1 goes on for a while although it is cancelled."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.sample_index == 0:
            raise ValueError("the real reason")
        until = time.monotonic() + 3 * DEADLINE_S
        while time.monotonic() < until:
            try:
                await asyncio.sleep(until - time.monotonic())
            except asyncio.CancelledError:
                continue
        return await SingleTurn().run(ctx)


def test_the_failure_of_a_loop_is_the_reason_also_if_another_one_does_not_end_in_time() -> None:
    with pytest.raises(ValueError, match="the real reason"):
        results_of(runner_of(config_with("cut"), FailsBesideOneThatStays()).run(0))


def test_loops_have_ended_when_their_group_is_cancelled() -> None:
    """So it is when a trainer begins anew: what it drops must not write any more."""
    loop = Waits(0, 1)

    async def scenario() -> None:
        runner = runner_of(config_with("cut", group_deadline_s=HELD_S), loop)
        running = asyncio.ensure_future(runner.run(0))
        while len(runner.stats.reward_seconds) < SAMPLES:
            await asyncio.sleep(0)
        await background.cancel_all([running], "groups")
        assert running.cancelled() and loop.cancelled == SAMPLES and not runner.progress

    results_of(scenario())
