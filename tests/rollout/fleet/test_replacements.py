"""Requests in flight while replicas are replaced: they wait for one that is coming, and only then."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from megarl.common.errors import NoPlace, NoReplicaLeft, ReplicaFailed, RequestFailed
from megarl.config.schema import TimeoutsConfig
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.agents.trajectory_builder import defect
from megarl.rollout.engine.continuation import MOST_ATTEMPTS, GroupDeadline, RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.fleet import engine_pool as fleet_module
from megarl.rollout.fleet.engine_pool import EnginePool, all_attempts_s
from tests.support.engines.fake_replicas import FakeReplica, Method, ScriptedReplica, SharesCalls, requests

LONG = SamplingSpec(10**9, 1.0, (2,))
REFUSAL = "was left in the middle of a failed weight sync"


class Starting:
    """The restarts of a fleet: each gives what `new` has for its index as soon as `go` is set, or raises it."""

    def __init__(self, new: dict[int, Any]) -> None:
        self.new = new
        self.begun: list[int] = []
        self.go = asyncio.Event()

    async def __call__(self, index: int, old: Any) -> Any:
        self.begun.append(index)
        await self.go.wait()
        if isinstance(self.new[index], Exception):
            raise self.new[index]
        return self.new[index]


def fleet_of(
    replicas: dict[int, Any],
    restart: Any = None,
    *,
    sync_restarts: int = 1,
    bound_s: float | None = None,
    shrinks: bool = True,
) -> EnginePool:
    bound = {} if bound_s is None else {"weight_sync_s": bound_s / 4, "engine_start_s": bound_s / 2}
    timeouts = TimeoutsConfig(generate_s=10, rpc_s=10, **bound)
    return EnginePool(replicas, timeouts, restart, report_interval_s=0.01, sync_restarts=sync_restarts, shrinks=shrinks)


def endless(name: str) -> list[GenerateRequest]:
    return [GenerateRequest(name, [1], LONG)]


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not done():
            await asyncio.sleep(0.001)


def resettable(replica: Any) -> Any:
    replica.reset = Method(lambda: asyncio.sleep(0))
    return replica


def refuse(*replicas: ScriptedReplica) -> None:
    """Fail as the leader of a failed sync has the replicas do."""
    for replica in replicas:
        replica.rounds, replica.outcome = 0, ReplicaFailed(replica.index, f"replica {replica.index} {REFUSAL}")


async def test_responses_in_flight_outlive_a_failed_sync_that_leaves_no_replica() -> None:
    old = {index: ScriptedReplica(index, 10**9, None) for index in (5, 6)}
    new = {index: ScriptedReplica(index, 0, "stop", version=4) for index in (5, 6)}
    restart = Starting(new)
    fleet = fleet_of(old, restart)
    groups = [asyncio.create_task(fleet.generate(RequestContext(name), endless(name))) for name in "ab"]
    await until(lambda: all(len(each.reported) >= 3 for each in old.values()))
    await fleet.begin_sync()
    refuse(*old.values())
    await until(lambda: not fleet.serving)
    later = asyncio.create_task(fleet.generate(RequestContext("c"), requests(3)))
    restarting = asyncio.create_task(fleet.restart([5, 6]))
    await until(lambda: restart.begun == [5, 6])
    restart.go.set()
    await restarting
    await asyncio.sleep(0.02)
    # The new engines have no weights yet.
    assert not fleet.serving and not any(each.asked for each in new.values())
    assert not any(task.done() for task in (*groups, later)) and set(fleet.lost) == {5, 6}
    fleet.admit_joining()
    assert fleet.serving == [5, 6] and not fleet.lost
    known = dict.fromkeys("ab", 0)
    for [result] in await asyncio.gather(*groups):
        [sent] = [each for each in new[result.replica].asked if each.request_id == result.request_id]
        known[result.request_id] = len(sent.prompt_ids) - 1
        # What was reported is not sampled again.
        assert result.response_ids == [*sent.prompt_ids[1:], result.replica] and result.lost_replicas >= 1
        assert [span.version for span in result.versions] == [3, 4]
    assert all(known.values())
    assert all(result.response_ids == [result.replica] and not result.lost_replicas for result in await later)


async def lose_the_last(fleet: EnginePool) -> list[asyncio.Task[list[GenerateResult]]]:
    """Three groups of a fleet of one replica, 0, of which one waits for room; then the replica is lost."""
    [record] = fleet.table
    replica: Any = record.client.actor  # type: ignore[union-attr]
    tasks = [asyncio.create_task(fleet.generate(RequestContext(name), endless(name))) for name in "xy"]
    await until(lambda: len(replica.asked) == 2)
    record.limit = 1.0
    tasks.append(asyncio.create_task(fleet.generate(RequestContext("z"), endless("z"))))
    await asyncio.sleep(0.01)
    assert len(replica.asked) == 2
    refuse(replica)
    await until(lambda: not fleet.serving)
    return tasks


async def check_all_fail(tasks: list[asyncio.Task[list[GenerateResult]]], message: str) -> None:
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5):
        assert isinstance(result, NoReplicaLeft) and result.replica == 0
        assert message in str(result)


@pytest.mark.parametrize("why", ["no sync", "sync without restarts", "sync is over", "the trainer has restarted"])
async def test_if_no_replacement_is_coming_every_group_is_told_at_once(why: str) -> None:
    replica = ScriptedReplica(0, 10**9, None)
    fleet = fleet_of({0: resettable(replica)}, sync_restarts=0 if why == "sync without restarts" else 1)
    if why != "no sync":
        await fleet.begin_sync()
    if why == "sync is over":
        fleet.admit_joining()
    if why == "the trainer has restarted":
        await fleet.reset()
    await check_all_fail(await lose_the_last(fleet), f"replica 0 {REFUSAL}")


async def test_a_trainer_that_is_asked_to_publish_brings_back_the_only_replica() -> None:
    """Its response goes on from its tokens; a trainer that is not there is not waited for."""
    old, new = ScriptedReplica(0, 10**9, None), ScriptedReplica(0, 0, "stop", version=4)
    old.reset = Method(FakeReplica(0, ReplicaFailed(0, "it is dead"))._reset)
    old.fail = Method(FakeReplica(0, ReplicaFailed(0, "it is dead"))._fail)
    restart = Starting({0: new})
    restart.go.set()
    fleet = fleet_of({0: old}, restart)
    fleet.expect_publication(True)
    assert not fleet.needs_publication
    tasks = await lose_the_last(fleet)
    assert "replica 0" in fleet.needs_publication and not any(task.done() for task in tasks)
    await fleet.begin_sync()
    assert not fleet.needs_publication, "the sync is under way"
    await fleet.restart([0])
    fleet.admit_joining()
    assert not fleet.needs_publication
    for [result] in await asyncio.gather(*tasks):
        assert result.response_ids[-1] == 0 and result.finish_reason == "stop"
    begun = {each.request_id: len(each.prompt_ids) > 1 for each in new.asked}
    assert begun == {"x": True, "y": True, "z": False}, "tokens are not made again"

    refuse(new)
    new.reported.clear()
    later = asyncio.create_task(fleet.generate(RequestContext("later"), endless("later")))
    await until(lambda: fleet.needs_publication)
    assert not later.done()
    fleet.expect_publication(False)  # it evaluates, and waits for just this
    await check_all_fail([later], REFUSAL)


async def test_a_sync_that_replaces_nothing_ends_the_wait() -> None:
    fleet = fleet_of({0: ScriptedReplica(0, 10**9, None)})
    await fleet.begin_sync()
    tasks = await lose_the_last(fleet)
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks)
    fleet.admit_joining()
    await check_all_fail(tasks, REFUSAL)


async def test_a_restart_that_fails_ends_the_wait_and_is_named() -> None:
    restart = Starting({0: ReplicaFailed(0, "waited 9 s for replica 0 to restart")})
    fleet = fleet_of({0: ScriptedReplica(0, 10**9, None)}, restart)
    restarting = asyncio.create_task(fleet.restart([0]))
    await until(lambda: restart.begun)
    waiting = asyncio.create_task(fleet.generate(RequestContext("x"), endless("x")))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    restart.go.set()
    with pytest.raises(ReplicaFailed, match="waited 9 s"):
        await restarting
    await check_all_fail([waiting], "waited 9 s for replica 0 to restart")


async def test_a_pool_on_the_trainers_gpus_does_not_continue_without_an_engine() -> None:
    """Nothing would start it again, and one that could not be reached may hold its memory."""
    restart = Starting({0: NoPlace(0, "replica 0 did not die within 9 s")})
    restart.go.set()
    replicas = {index: ScriptedReplica(index, 10**9, None) for index in range(2)}
    fleet = fleet_of(replicas, restart)
    await fleet.restart([0])
    assert fleet.members == [1]
    fixed = fleet_of(replicas, restart, shrinks=False)
    with pytest.raises(NoPlace, match="did not die within 9 s"):
        await fixed.restart([0])


async def test_the_wait_is_bounded() -> None:
    fleet = fleet_of({0: ScriptedReplica(0, 10**9, None)}, bound_s=0.1)
    await fleet.begin_sync()
    started = time.monotonic()
    named = "1 responses waited 0 s (timeouts.weight_sync_s and engine_start_s) for a new replica after: replica 0"
    await check_all_fail(await lose_the_last(fleet), named)
    assert time.monotonic() - started >= 0.1


async def test_the_wait_ends_at_the_deadline_of_the_group() -> None:
    replica = ScriptedReplica(0, 10**9, None)
    fleet = fleet_of({0: replica})
    await fleet.begin_sync()
    deadline = GroupDeadline(time.monotonic() + 0.2, 0.2, "cut")
    group = asyncio.create_task(fleet.generate(RequestContext("x", deadline=deadline), endless("x")))
    await until(lambda: len(replica.reported) > 2)
    refuse(replica)
    await until(lambda: not fleet.serving)
    [result] = await asyncio.wait_for(group, 5)
    assert time.monotonic() >= deadline.at
    assert result.cut and set(result.response_ids) == {0} and len(result.response_ids) >= 2


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
async def test_the_last_answer_of_a_replaced_replica_does_not_count_for_the_new_one(ends: bool) -> None:
    class Late(ScriptedReplica):
        asked_again, answer = asyncio.Event(), asyncio.Event()

        async def _report(self, reported: dict[str, int], wait_s: float) -> Any:
            if self.reported:
                self.asked_again.set()
                await self.answer.wait()
            return await super()._report(reported, wait_s)

    old, new = Late(0, 1 if ends else 2, "stop"), ScriptedReplica(0, 3, None)
    restart = Starting({0: new})
    restart.go.set()
    fleet = fleet_of({0: old}, restart)
    late = asyncio.create_task(fleet.generate(RequestContext("late"), requests(1)))
    await old.asked_again.wait()
    await fleet.restart([0])
    fleet.admit_joining()
    now = asyncio.create_task(fleet.generate(RequestContext("now"), endless("now")))
    await until(lambda: new.asked)
    old.answer.set()
    if ends:
        assert [result.response_ids for result in await late] == [[0, 0]] * 2
    else:
        await until(lambda: len(new.asked) == 3)
    assert fleet.table[0].load == (1 if ends else 3)
    late.cancel()
    now.cancel()


def test_the_bound_covers_every_attempt_at_a_sync() -> None:
    timeouts = TimeoutsConfig(weight_sync_s=10, engine_start_s=100)
    assert [all_attempts_s(timeouts, restarts) for restarts in (0, 1, 2)] == [10, 120, 230]


async def test_a_lost_replica_that_is_sound_serves_again_after_the_next_sync() -> None:
    """Its report was late; it is not replaced, and what it had is not asked of it again."""
    stuck = asyncio.Event()
    late, other = ScriptedReplica(0, 3, None), FakeReplica(1)

    async def report(reported: dict[str, int], wait_s: float) -> EngineReport:
        late.reported.append(reported)
        if len(late.reported) <= late.rounds:
            return dict.fromkeys(reported, ResponsePart([0], [-0.5], (VersionSpan(3, 0, 1),))), EngineLoad()
        await stuck.wait()
        raise RequestFailed("replica 0 does not know the requests that it has dropped")

    late.report, late.reset = Method(report), Method(FakeReplica(0)._reset)
    fleet = fleet_of({0: late, 1: other})
    begun = asyncio.create_task(fleet.generate(RequestContext("g", home=0), endless("x")))
    await until(lambda: len(late.reported) > late.rounds)
    fleet.table.lose(0, ReplicaFailed(0, "its report was late"))
    await fleet.begin_sync()
    assert fleet.serving == [1] and not other.said
    fleet.admit_joining()
    assert fleet.serving == [0, 1] and not fleet.lost
    stuck.set()  # the call of before ends now, and says nothing about the replica of today
    await until(lambda: other.served or len(late.asked) > 1)
    assert fleet.serving == [0, 1] and [each.load for each in fleet.table] == [len(late.asked) - 1, 0]
    begun.cancel()


async def test_a_lost_replica_that_cannot_be_reset_refuses_the_next_sync_so_that_it_is_replaced() -> None:
    async def cannot() -> None:
        raise ReplicaFailed(1, "it was left in the middle of a sync")

    starting = Starting({2: FakeReplica(2)})
    replicas = {index: FakeReplica(index) for index in range(3)}
    replicas[1].reset = Method(cannot)
    fleet = fleet_of(replicas, starting)
    fleet.table.lose(1, ReplicaFailed(1, "its report was late"))
    restart = asyncio.create_task(fleet.restart([2]))
    await until(lambda: starting.begun)
    await fleet.begin_sync()
    assert [each.said for each in replicas.values()] == [[], ["was lost: its report was late"], []]
    starting.go.set()
    await restart


@pytest.mark.parametrize("silent", [False, True])
async def test_a_lost_replica_that_is_dead_does_not_hold_the_next_sync(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_RESET_S", 0.05)
    monkeypatch.setattr(fleet_module, "_RETIRE_S", 0.05)
    replica = FakeReplica(0, ReplicaFailed(0, "it died"), delay_s=60 if silent else 0)
    fleet = fleet_of({0: replica})
    fleet.table.lose(0, ReplicaFailed(0, "it died"))
    await asyncio.wait_for(fleet.begin_sync(), 1)
    assert list(fleet.lost) == [0] and not replica.said


async def test_a_lost_replica_takes_part_in_a_sync_that_would_not_replace_it() -> None:
    """Its refusal would end the run, although the other replicas are healthy (`weight_sync.restarts: 0`)."""

    async def cannot() -> None:
        raise ReplicaFailed(0, "it is busy")

    replicas = {index: FakeReplica(index) for index in range(2)}
    replicas[0].reset = Method(cannot)
    fleet = fleet_of(replicas, sync_restarts=0)
    fleet.table.lose(0, ReplicaFailed(0, "its report was late"))
    await fleet.begin_sync()
    assert fleet.serving == [1] and list(fleet.lost) == [0] and not replicas[0].said


async def test_a_request_that_ends_every_engine_fails_after_some_and_leaves_the_others() -> None:
    dying = {index: FakeReplica(index, ReplicaFailed(index, "its engine died")) for index in range(5)}
    fleet = fleet_of(dying)
    results = await fleet.generate(RequestContext("g"), requests(0))
    reason = "3 replicas in a row were lost before they made a token of it"
    assert [(each.finish_reason, each.failure, defect(each)) for each in results] == [("abort", reason, reason)] * 2
    assert len(fleet.serving) == 5 - MOST_ATTEMPTS


class Paced(SharesCalls):
    """Makes a token of each request per report, for which a response takes `token_s`; ends at `max_tokens`."""

    def __init__(self, index: int, token_s: float) -> None:
        self.index, self.token_s = index, token_s
        self.made: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.generate, self.report = Method(self._generate), Method(self._report)
        fake = FakeReplica(index)
        self.said, self.reset, self.fail = fake.said, fake.reset, fake.fail

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        self.limits |= {each.request_id: each.sampling.max_tokens for each in requests}
        self.made |= {each.request_id: 0 for each in requests}
        return await self._report({each.request_id: 0 for each in requests}, wait_s)

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        await asyncio.sleep(0.001)
        parts = {}
        for name in reported:
            self.made[name] += 1
            end: Any = "length" if self.made[name] >= self.limits[name] else None
            seconds = self.made[name] * self.token_s
            parts[name] = ResponsePart([self.index], [-0.5], (VersionSpan(3, 0, 1),), end, seconds)
        return parts, EngineLoad()


async def test_an_engine_that_is_far_slower_than_the_others_is_drained_and_not_used_again() -> None:
    replicas = {0: Paced(0, 0.01), 1: Paced(1, 0.2), 2: Paced(2, 0.01)}
    fleet = fleet_of(replicas)
    note = fleet.table.note_progress
    fleet.table.note_progress = lambda lease, progress, now, _: note(lease, progress, now, 0.05)  # type: ignore[method-assign]
    long = SamplingSpec(400, 1.0, (2,))
    groups = [
        asyncio.create_task(fleet.generate(RequestContext(f"g{i}", home=i), [GenerateRequest(f"x{i}", [1], long)]))
        for i in range(3)
    ]
    results = [result for [result] in await asyncio.gather(*groups)]
    assert fleet.serving == [0, 2] and "times slower than the others" in str(fleet.lost[1])
    [moved] = [result for result in results if result.lost_replicas]
    assert moved.response_ids[0] == 1 and moved.response_ids[-1] in (0, 2) and len(moved.response_ids) == 400
    await fleet.begin_sync()
    assert replicas[1].said and not fleet.table[1].coming, "the sync replaces it"


async def test_an_engine_that_was_drained_is_replaced_when_the_trainer_restarts() -> None:
    """It answers the reset, but would be as slow as before."""
    new = FakeReplica(1)
    restart = Starting({1: new})
    restart.go.set()
    fleet = fleet_of({0: FakeReplica(0), 1: FakeReplica(1)}, restart)
    for index, tokens in ((0, 100), (1, 1)):
        fleet.table.note_progress(fleet.table[index].lease(), (tokens, 1.0), 0.0, 0.0)
    assert fleet.serving == [0] and "times slower than the others" in str(fleet.lost[1])
    await fleet.reset()
    fleet.admit_joining()
    assert fleet.serving == [0, 1] and fleet.table[1].client.actor is new and restart.begun == [1]
    fleet.table.note_progress(fleet.table[1].lease(), (20, 1.0), 0.0, 0.0)
    assert fleet.serving == [0, 1], "the new one was judged by what the old one had made too"


async def test_a_replica_that_was_lost_and_serves_again_does_not_go_on_with_its_former_work() -> None:
    """It has dropped that work, which is sent again, to it or to another one."""
    gate, replicas = asyncio.Event(), {0: Paced(0, 0.01), 1: Paced(1, 0.01)}
    report = replicas[0]._report

    async def held(reported: dict[str, int], wait_s: float) -> EngineReport:
        await gate.wait()
        return await report(reported, wait_s)

    replicas[0].report = Method(held)
    fleet = fleet_of(replicas)
    request = GenerateRequest("x", [1], SamplingSpec(50, 1.0, (2,)))
    task = asyncio.create_task(fleet.generate(RequestContext("g", home=0), [request]))
    await asyncio.sleep(0.05)
    fleet.table.lose(0, ReplicaFailed(0, "its report was late"))
    await fleet.reset()
    fleet.admit_joining()
    assert fleet.serving == [0, 1] and fleet.table[0].client.actor is replicas[0]
    gate.set()
    [result] = await task
    assert result.lost_replicas == 1 and len(result.response_ids) == 50
