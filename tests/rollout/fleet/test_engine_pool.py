"""Fleet without processes: failover, bounds, and errors that name the replica."""

import asyncio
import time
from typing import Any

import pytest

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported
from ray.exceptions import RayTaskError

from megarl.common.errors import EngineMayRun, ReplicaFailed, RequestFailed, RolloutError
from megarl.common.process.held_outputs import hold_within
from megarl.config.schema import TimeoutsConfig
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.continuation import GroupDeadline, RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec, continuation_seed
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.rpc import as_rollout_error
from tests.support.engines.fake_replicas import (
    FakeReplica,
    HoldingReplica,
    Method,
    ScriptedReplica,
    SharesCalls,
    answered,
    fleet_of,
    requests,
)  # fmt: skip


@pytest.mark.parametrize("wait", ["for a report", "for room", "for a replacement"])
async def test_a_cancellation_counts_although_the_wait_ends_in_the_same_moment(wait: str) -> None:
    """`asyncio.wait_for` of Python 3.11 would lose it, and a resume would wait for the end of the response."""
    slow = ScriptedReplica(0, 10**9, None)
    fleet, answer = fleet_of({0: slow}), asyncio.get_running_loop().create_future()
    if wait == "for a report":
        slow.report = Method(lambda reported, wait_s: answer)
    elif wait == "for room":
        fleet.table[0].limit = 1.0
        busy = fleet._router.assign("busy", 9, 0)
        assert busy is not None
    else:
        await fleet.begin_sync()
        fleet.table.lose(0, ReplicaFailed(0, "gone"))
    request = GenerateRequest("x", [1], SamplingSpec(10**9, 1.0, ()))
    task = asyncio.create_task(fleet.generate(RequestContext("g"), [request]))
    await asyncio.sleep(0.02)
    assert not task.done()
    if wait == "for a report":
        answer.set_result(({"x": ResponsePart()}, EngineLoad()))
    elif wait == "for room":
        fleet._router.release("busy", busy, 9)
    else:
        fleet.table.end_sync()
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()


async def test_a_silent_replica_is_an_error_after_the_bound() -> None:
    with pytest.raises(RolloutError, match="waited 0 s for replica 0 to generate"):
        await fleet_of({0: FakeReplica(0, delay_s=5)}, generate_s=0.02, rpc_s=0.03).generate(
            RequestContext("g"), requests(0)
        )


@pytest.mark.parametrize("end", [ReplicaFailed(5, "replica 5 is dead"), None], ids=["dead", "silent"])
def test_the_next_replica_goes_on_from_the_tokens_that_a_lost_one_has_reported(end: Exception | None) -> None:
    first, second = ScriptedReplica(5, 2, end), ScriptedReplica(6, 1, "stop", version=4)
    long = [GenerateRequest(name, [1, 2], SamplingSpec(8, 1.0, (9,)), seed=seed) for name, seed in (("x", 7), ("y", 8))]

    async def run() -> tuple[list[GenerateResult], EnginePool]:
        fleet = fleet_of({5: first, 6: second}, interval_s=0.02, rpc_s=0.03)
        return await fleet.generate(RequestContext("g"), long), fleet

    results, fleet = asyncio.run(run())
    assert fleet.serving == [6]
    assert [request.prompt_ids for request in second.asked] == [[1, 2, 5, 5]] * 2
    assert [request.sampling.max_tokens for request in second.asked] == [6, 6]
    assert [request.seed for request in second.asked] == [continuation_seed(7, 2), continuation_seed(8, 2)]
    # Each replica counts the tokens that it made itself.
    assert [list(each.values()) for each in first.reported] == [[0, 0], [1, 1], [2, 2]]
    assert [list(each.values()) for each in second.reported] == [[0, 0], [1, 1]]
    for result, name in zip(results, "xy", strict=True):
        assert (result.request_id, result.replica, result.lost_replicas) == (name, 6, 1)
        assert result.response_ids == [5, 5, 6, 6] and result.logprobs == [-0.1, -0.2, -0.1, -0.2]
        assert result.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 4))
        assert (result.finish_reason, result.seconds) == ("stop", 2 + 2)


@pytest.mark.parametrize("interval_s", [5.0, 0.5, 0.3])
@pytest.mark.parametrize("lost_after", [0, 1, 3])
async def test_a_lost_engine_takes_the_tokens_of_one_interval_with_it(interval_s: float, lost_after: int) -> None:
    """Those that its process held at the last report included."""
    first, second = HoldingReplica(hold_within(interval_s), lost_after), ScriptedReplica(1, 0, "stop")
    fleet = fleet_of({0: first, 1: second}, generate_s=600.0, interval_s=interval_s)
    await fleet.generate(RequestContext("g"), [GenerateRequest("x", [1], SamplingSpec(10**6, 1.0, ()))])
    [request] = second.asked
    lost = 1000 * first.now_s - (len(request.prompt_ids) - 1)
    assert 0 < lost <= 1000 * interval_s + 1
    assert lost_after == 0 or lost > 900 * interval_s, "reports come more often than they must"


async def test_a_response_that_takes_too_long_fails_its_group_and_costs_no_engine() -> None:
    """Its last tokens are kept: they are the length of what has failed."""
    endless, other = ScriptedReplica(0, 10**9, None), FakeReplica(1)
    tokens: dict[str, ResponsePart] = {}
    fleet = fleet_of({0: endless, 1: other}, generate_s=0.05)
    long = [GenerateRequest("x", [1], SamplingSpec(10**9, 1.0, ()))]
    message = r"^1 of 1 responses were unfinished after 0.05 s \(timeouts.generate_s\) in replica 0, .* tokens: x$"
    with pytest.raises(RolloutError, match=message) as caught:
        await fleet.generate(RequestContext("g", tokens=tokens), long)
    assert not isinstance(caught.value, ReplicaFailed)
    assert fleet.serving == [0, 1] and not fleet.lost and not other.served
    assert [each.load for each in fleet.table] == [0, 0] and [list(each) for each in endless.ended] == [["x"]]
    assert tokens["x"].response_ids == [0] * len(endless.reported) + [7, 7]


async def test_an_engine_that_cannot_stop_a_response_that_takes_too_long_is_lost() -> None:
    silent = ScriptedReplica(0, 10**9, None, refusal=ReplicaFailed(0, "replica 0 has made no step"))
    fleet = fleet_of({0: silent, 1: FakeReplica(1)}, generate_s=0.05)
    answers = await fleet.generate(RequestContext("g"), [GenerateRequest("x", [1], SamplingSpec(10**9, 1.0, ()))])
    assert fleet.serving == [1] and "has made no step" in str(fleet.lost[0])
    [result] = answers
    assert result.replica == 1 and result.response_ids == [0] * len(silent.reported) + [1]


@pytest.mark.parametrize("refusal", [None, ReplicaFailed(0, "replica 0 is gone")], ids=["ends", "lost"])
def test_responses_that_are_unfinished_at_the_deadline_are_cut_or_fail_the_group(refusal: Exception | None) -> None:
    """If the replica is lost just then, nothing is sent to another one any more."""
    long = [GenerateRequest(f"r{i}", [1], SamplingSpec(10**9, 1.0, ())) for i in range(4)]

    async def run(policy: Any) -> tuple[ScriptedReplica, list[GenerateResult]]:
        replica, other = ScriptedReplica(0, 10**9, None, refusal=refusal), FakeReplica(1)
        fleet = fleet_of({0: replica, 1: other})
        deadline = GroupDeadline(time.monotonic() + 0.5, 0.5, policy)
        try:
            return replica, await asyncio.wait_for(fleet.generate(RequestContext("g", deadline=deadline), long), 5)
        finally:
            assert not other.served and len(replica.ended) == 1
            assert fleet.serving == ([0, 1] if refusal is None else [1])

    replica, results = asyncio.run(run("cut"))
    [known] = {*replica.ended[0].values()}
    last = [] if refusal is not None else [7, 7]
    assert known == len(replica.reported) > 1
    for result in results:
        assert result.response_ids == [0] * known + last and len(result.logprobs) == known + len(last)
        assert result.finish_reason == "length" and result.cut and result.versions[-1].end == len(result.response_ids)
    names = r"4 of 4 responses were unfinished at the group's deadline of 0.5 s .* tokens: r0, r1, r2 and 1 more$"
    with pytest.raises(RolloutError, match=names):
        asyncio.run(run("fail"))


def test_a_deadline_leaves_what_ends_before_it_alone() -> None:
    async def run() -> list[GenerateResult]:
        deadline = GroupDeadline(time.monotonic() + 60, 60, "fail")
        return await fleet_of({0: ScriptedReplica(0, 2, "stop")}).generate(
            RequestContext("g", deadline=deadline), requests(0)
        )

    results = asyncio.run(run())
    assert [(each.response_ids, each.finish_reason, each.cut) for each in results] == [([0] * 3, "stop", False)] * 2


def test_what_another_call_has_found_lost_or_replaced_is_left_at_its_next_report() -> None:
    """A replaced replica does not know the request, and the new one of the same number is sound."""

    async def run(how: str) -> tuple[EnginePool, list[GenerateResult]]:
        slow = ScriptedReplica(0, 10**9, None)
        fleet = fleet_of({0: slow, 1: FakeReplica(1)}, FakeReplica(0))
        request = GenerateRequest("x", [1], SamplingSpec(10**9, 1.0, ()))
        answers = asyncio.create_task(fleet.generate(RequestContext("g"), [request]))
        while len(slow.reported) < 3:
            await asyncio.sleep(0)
        if how == "lost":
            fleet.table.lose(0, ReplicaFailed(0, "replica 0 hangs"))
        else:
            await fleet.restart([0])
            fleet.admit_joining()
        return fleet, await asyncio.wait_for(answers, 5)

    fleet, [result] = asyncio.run(run("lost"))
    assert fleet.serving == [1] and result.response_ids[-1] == 1
    fleet, [result] = asyncio.run(run("replaced"))
    assert fleet.serving == [0, 1] and not fleet.lost and len(result.response_ids) >= 4


class Crowded(SharesCalls):
    """Is under pressure with more than `capacity` requests; a call ends at its second report."""

    def __init__(self, index: int, capacity: int) -> None:
        self.index, self.capacity = index, capacity
        self.order: list[str] = []
        self.now = self.most = 0
        self.generate, self.report = Method(self._generate), Method(self._report)

    def load(self) -> EngineLoad:
        self.most = max(self.most, self.now)
        return EngineLoad(1.0, self.capacity, self.now - self.capacity) if self.now > self.capacity else EngineLoad()

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        self.order += [request.request_id for request in requests]
        self.now += len(requests)
        await asyncio.sleep(0.001)
        return {request.request_id: ResponsePart() for request in requests}, self.load()

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        await asyncio.sleep(0.001)
        part = ResponsePart([self.index], [-0.5], (VersionSpan(3, 0, 1),), "stop")
        report = (dict.fromkeys(reported, part), self.load())
        self.now -= len(reported)
        return report


def test_requests_are_held_back_from_a_replica_under_pressure_in_their_order() -> None:
    crowded = Crowded(0, capacity=8)

    async def run() -> list[Any]:
        fleet = fleet_of({0: crowded})
        first = await asyncio.gather(*(fleet.generate(RequestContext(group), requests(group)) for group in range(20)))
        assert crowded.most == 40
        crowded.most, crowded.order = 0, []
        second = await asyncio.gather(
            *(fleet.generate(RequestContext(group), requests(group)) for group in range(20, 60))
        )
        third = await asyncio.gather(
            *(fleet.generate(RequestContext(group), requests(group)) for group in range(60, 100))
        )
        assert fleet.take_load() == EngineLoad(1.0, 8, 32) and fleet.take_load() == EngineLoad()
        return [*first, *second, *third]

    assert len(asyncio.run(run())) == 100
    assert crowded.most < 40 and crowded.order == [f"{group}.{i}" for group in range(20, 100) for i in range(2)]


async def test_the_speed_of_each_replica_is_of_the_time_in_which_it_had_work() -> None:
    prefix = "rollout/replica_tokens_per_second/"
    fleet = fleet_of({0: Crowded(0, capacity=8), 1: Crowded(1, capacity=8)})
    for turn in range(2):
        began = time.monotonic()
        await asyncio.gather(*(fleet.generate(RequestContext((turn, group)), requests(group)) for group in range(8)))
        seconds = time.monotonic() - began
        await asyncio.sleep(0.5 + 5 * seconds)  # which counts neither now nor later
        rates = fleet.take_rates()
        assert {name.removeprefix(prefix) for name in rates if name.startswith(prefix)} == {"0", "1"}
        # One token of each of the 16 responses, half of them on each replica.
        assert all(rates[f"{prefix}{index}"] >= 8 / seconds for index in range(2))
        assert rates["rollout/replica_tokens_per_second_min"] <= rates["rollout/replica_tokens_per_second_max"]
        assert fleet.take_rates() == {}


async def test_a_request_that_finds_no_room_is_told_so_after_the_bound_or_cut_at_its_deadline() -> None:
    class Stuck(Crowded):
        async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
            await asyncio.sleep(wait_s)
            return {name: ResponsePart() for name in reported}, self.load()

    fleet = fleet_of({0: Stuck(0, capacity=1), 1: Stuck(1, capacity=1)}, generate_s=0.2, interval_s=0.02)
    held = [asyncio.create_task(fleet.generate(RequestContext(group), requests(group))) for group in range(2)]
    await asyncio.sleep(0.05)
    deadline = GroupDeadline(time.monotonic() + 0.01, 0.01, "cut")
    cut = await fleet.generate(RequestContext("cut", deadline=deadline), requests(7))
    assert [(each.response_ids, each.cut) for each in cut] == [([], True)] * 2
    fleet._calls._timeouts = TimeoutsConfig(generate_s=0.02)
    with pytest.raises(
        RolloutError, match=r"2 requests waited 0 s for room in a replica; requests in flight: \{0: 2, 1: 2\}"
    ):
        await fleet.generate(RequestContext("more"), requests(8))
    for task in held:
        task.cancel()


async def test_a_lost_replica_leaves_its_place_to_those_that_wait() -> None:
    """Whoever waits learns of a replica that joins."""
    slow, new = ScriptedReplica(0, 10**9, None), FakeReplica(1)
    fleet = fleet_of({0: slow, 1: FakeReplica(1)}, new)
    fleet.table.lose(1, ReplicaFailed(1, "gone"))
    begun = asyncio.create_task(
        fleet.generate(RequestContext("g"), [GenerateRequest("x", [1], SamplingSpec(10**9, 1.0, ()))])
    )
    while len(slow.reported) < 3:
        await asyncio.sleep(0)
    for _ in range(9):  # down to a limit of one
        fleet.table[0].limit = 1.0
    waiting = asyncio.create_task(fleet.generate(RequestContext("h"), requests(3)))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await fleet.restart([1])
    fleet.admit_joining()
    fleet.table.lose(0, ReplicaFailed(0, "gone too"))
    ended = await asyncio.gather(begun, waiting)
    assert answered([*ended[0], *ended[1]]) == ["1:x", "1:3.0", "1:3.1"]


async def test_a_response_that_a_lost_replica_had_begun_does_not_wait_for_room() -> None:
    slow, busy = ScriptedReplica(0, 10**9, None), ScriptedReplica(1, 10**9, None)
    fleet = fleet_of({0: slow, 1: busy})
    endless = {name: GenerateRequest(name, [1], SamplingSpec(10**9, 1.0, ())) for name in "xyz"}
    tasks = [asyncio.create_task(fleet.generate(RequestContext(name), [endless[name]])) for name in "xy"]
    while len(slow.reported) < 3 or not busy.reported:
        await asyncio.sleep(0)
    for replica in (0, 1):
        fleet.table[replica].limit = 1.0
    tasks.append(asyncio.create_task(fleet.generate(RequestContext("z"), [endless["z"]])))
    await asyncio.sleep(0)
    fleet.table.lose(0, ReplicaFailed(0, "gone"))
    await asyncio.sleep(0.05)
    assert [request.request_id for request in busy.asked] == ["y", "x"]
    for task in tasks:
        task.cancel()


class ActorDiedError(Exception):
    """Has the name of Ray's exception."""


def test_errors_of_an_actor_call_are_told_apart() -> None:
    died = as_rollout_error(2, "generate", ActorDiedError("..."), "see log")
    assert isinstance(died, ReplicaFailed)
    assert str(died) == "replica 2 died while it was asked to generate; see log" and died.replica == 2
    runs = as_rollout_error(2, "shutdown", EngineMayRun(2, "processes 7 of its engine do not end"), "see log")
    assert isinstance(runs, EngineMayRun) and not isinstance(died, EngineMayRun)
    other = as_rollout_error(1, "pause", ValueError("first\nsecond"), "see log")
    assert str(other) == "replica 1 failed to pause: ValueError: first; see log"


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (RequestFailed("replica 1 refused a request: too long"), "replica 1 refused a request: too long"),
        (ReplicaFailed(1, "replica 1 is dead"), "replica 1 is dead; see log"),
        (OSError("no space"), "replica 1 failed to generate: OSError: no space; see log"),
    ],
)
def test_the_text_of_an_error_is_the_replicas_own_and_not_the_traceback(cause: Exception, message: str) -> None:
    """Ray's exception is an instance of the cause's type too, but its text is the traceback of the remote call."""
    raised = RayTaskError("generate", "Traceback (most recent call last): ...", cause, pid=1, ip="host", actor_id="a")
    dual = raised.as_instanceof_cause()
    assert isinstance(dual, type(cause)) and str(dual) != str(cause)
    assert str(as_rollout_error(1, "generate", dual, "see log")) == message


async def test_a_refused_request_costs_no_replica() -> None:
    """One bad request would otherwise be tried on, and end, every engine in turn."""
    replicas = {i: FakeReplica(i, RequestFailed(f"replica {i} refused a request: too long")) for i in range(3)}
    fleet = fleet_of(replicas)
    with pytest.raises(RequestFailed, match="refused a request: too long"):
        await fleet.generate(RequestContext("a"), requests(0))
    assert fleet.serving == [0, 1, 2] and not fleet.lost


async def test_reset_replaces_what_cannot_serve() -> None:
    class Resettable(FakeReplica):
        def __init__(self, index: int, fail: Exception | None = None) -> None:
            super().__init__(index)
            self.broken = fail
            self.reset = Method(self._reset)

        async def _reset(self) -> None:
            if self.broken is not None:
                raise self.broken

    new = Resettable(1)
    fleet = fleet_of({0: Resettable(0), 1: Resettable(1, ReplicaFailed(1, "left in a sync"))}, new)
    await fleet.reset()
    assert fleet.serving == [0]
    fleet.admit_joining()
    assert fleet.serving == [0, 1]
    assert answered(await fleet.generate(RequestContext("a", home=1), requests(0))) == ["1:0.0", "1:0.1"] and new.served


async def test_a_replica_that_the_trainer_has_quarantined_gets_nothing_more_and_refuses_the_next_sync() -> None:
    """Its responses continue elsewhere. The sync, which it refuses, replaces it, although it would answer."""
    sick = ScriptedReplica(0, 10**9, None)
    sick.reset, sick.fail = Method(FakeReplica(0)._reset), Method((failing := FakeReplica(0))._fail)  # type: ignore[attr-defined]
    fleet = fleet_of({0: sick, 1: FakeReplica(1)}, FakeReplica(0))
    fleet.expect_publication(True)
    running = asyncio.create_task(fleet.generate(RequestContext("a", home=0), requests(0)))
    while len(sick.reported) < 3:
        await asyncio.sleep(0)
    done, text = fleet.table.quarantine(0, "alarm replica_gap of replica 0")
    assert done and text == "replica 0 is quarantined until the next publication has replaced it"
    assert all(answer.replica == 1 for answer in await running), "its responses do not continue elsewhere"
    assert fleet.serving == [1] and fleet.table[0].does == "lost"
    assert (await fleet.generate(RequestContext("b", home=0), requests(1)))[0].replica == 1
    await fleet.begin_sync()
    assert len(failing.said) == 1 and "alarm replica_gap of replica 0" in failing.said[0]
    await fleet.restart([0])
    fleet.admit_joining()
    assert fleet.serving == [0, 1]
    assert fleet.table.quarantine(1, "again")[0], "there is another one again"
