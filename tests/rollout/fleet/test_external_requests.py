"""Requests from outside in the controller, over the real fleet and replicas in this process."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tests.support.pool.ray_token  # noqa: F401  # isort: skip  # before Ray is imported
from megarl.common.errors import ReplicaFailed, RequestFailed, RolloutError
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart, first_tokens, join_parts, tokens_from
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.external_requests import ExternalDrop, ExternalNews, ExternalRequest, ExternalRequests
from tests.support.engines.fake_replicas import FakeReplica, fleet_of
from tests.support.gateway.gateway_stand_in import SpeakingReplica

GATEWAY = "gateway-1"


class Gateway:
    """The other side of the link: `news` are those of the last call by name, `seen` is its number."""

    def __init__(self, requests: ExternalRequests, name: str = GATEWAY) -> None:
        self.link, self.name = requests.link, name
        self.given = self.seen = 0
        self.news: dict[str, ExternalNews] = {}

    async def give(self, *messages: ExternalRequest | ExternalDrop) -> None:
        self.given += 1
        await self.link.give(self.given, messages, self.name)

    async def take(self) -> dict[str, ExternalNews]:
        self.seen, messages, _ = await self.link.take(self.seen, 60.0, self.name)
        self.news = {each.name: each for each in messages}
        return self.news


def answer(request: GenerateRequest) -> Sequence[int]:
    """Continues the prompt by counting."""
    return range(request.prompt_ids[-1] + 1, request.prompt_ids[-1] + 1 + request.sampling.max_tokens)


def asked(name: str, tokens: int = 6, timeout_s: float = 60.0, **more: Any) -> ExternalRequest:
    request = GenerateRequest(name, [100], SamplingSpec(tokens, 1.0, (2,)))
    return ExternalRequest(request, name, timeout_s, interval_s=0.01, **more)


async def all_news(gateway: Gateway, names: set[str]) -> dict[str, ExternalNews]:
    """Take news until all have ended; the last of each, with all of its tokens."""
    parts: dict[str, ResponsePart] = {}
    ends: dict[str, ExternalNews] = {}
    while names - ends.keys():
        for name, news in (await gateway.take()).items():
            parts[name] = join_parts(parts.get(name, ResponsePart()), news.part)
            if news.ended:
                ends[name] = ExternalNews(name, parts[name], news.replica, news.failure, news.error)
    return ends


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_requests_of_one_call_end_by_themselves() -> None:
    replica = SpeakingReplica(0, answer, pace_s=0.001)
    requests = ExternalRequests(fleet_of({0: replica}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("long", 300), asked("short", 2))
    gateway.given -= 1
    await gateway.give(asked("short", 2))  # the call was sent again
    ends = await all_news(gateway, {"short"})
    assert ends["short"].part.response_ids == [101, 102] and ends["short"].replica == 0
    ends = await all_news(gateway, {"long"})
    assert len(replica.asked) == 2 and replica.working == 0


async def test_a_lost_report_is_given_again() -> None:
    requests = ExternalRequests(fleet_of({0: SpeakingReplica(0, answer)}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a"))
    report = await gateway.take()
    assert gateway.seen == 1 and "a" in report
    for _ in range(2):
        gateway.seen = 0
        assert await gateway.take() == report
    gateway.seen = 0
    ends = await all_news(gateway, {"a"})
    assert ends["a"].part.response_ids == [101, 102, 103, 104, 105, 106]


async def test_a_hold_stops_the_work_and_what_was_reported_is_continued() -> None:
    replica = SpeakingReplica(0, answer, pace_s=0.002)
    requests = ExternalRequests(fleet_of({0: replica}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a", 200))
    report = await gateway.take()
    assert report["a"].part.response_ids[0] == 101
    await requests.hold()
    await until(lambda: replica.stopped == ["a"] and replica.working == 0)
    await gateway.give(asked("b", 3))
    assert len(replica.asked) == 1
    requests.serve()
    requests.serve()
    ends = await all_news(gateway, {"b"})
    assert ends["b"].part.response_ids == [101, 102, 103]
    [continued] = [each for each in replica.asked[1:] if each.request_id == "a"]
    assert continued.prompt_ids[:2] == [100, 101]
    assert continued.sampling.max_tokens == 200 - (len(continued.prompt_ids) - 1)


async def test_the_tokens_through_holds_and_lost_replicas_are_those_of_an_undisturbed_response() -> None:
    replicas = {i: SpeakingReplica(i, answer, pace_s=0.001) for i in range(2)}
    fleet: EnginePool = fleet_of(replicas)
    requests = ExternalRequests(fleet, serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a", 150))
    part = (await gateway.take())["a"].part
    replicas[0].dead = True
    await asyncio.sleep(0.02)
    await requests.hold()
    requests.serve()
    ends = await all_news(gateway, {"a"})
    whole = join_parts(part, ends["a"].part)
    assert whole.response_ids == list(range(101, 251)) and ends["a"].replica == 1
    assert whole.versions == (VersionSpan(0, 0, 150),)


async def test_a_request_whose_time_is_over_is_stopped_and_says_why() -> None:
    replica = SpeakingReplica(0, answer, pace_s=0.01)
    requests = ExternalRequests(fleet_of({0: replica}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a", 10**6, timeout_s=0.1))
    end = (await all_news(gateway, {"a"}))["a"]
    assert end.failure == "late" and "timeouts.generate_s" in end.error and "replicas that serve: [0]" in end.error
    await asyncio.sleep(0.01)
    assert replica.working == 0


async def test_the_time_also_runs_while_all_are_held_back() -> None:
    requests = ExternalRequests(fleet_of({0: SpeakingReplica(0, answer, pace_s=60.0)}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("before", timeout_s=0.2))
    await asyncio.sleep(0)
    await requests.hold()
    await gateway.give(asked("during", timeout_s=0.1))
    ends = await all_news(gateway, {"before", "during"})
    assert {end.failure for end in ends.values()} == {"late"}
    assert "wait for weights from the trainer" in ends["during"].error


@pytest.mark.parametrize(
    ("error", "failure"), [(RequestFailed("too long"), "refused"), (ReplicaFailed(0, "it is dead"), "unavailable")]
)
async def test_failures_are_reported(error: Exception, failure: str) -> None:
    requests = ExternalRequests(fleet_of({0: FakeReplica(0, error)}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a"))
    end = (await all_news(gateway, {"a"}))["a"]
    assert end.failure == failure and str(error) in end.error


async def test_another_gateway_and_a_drop_end_the_work() -> None:
    replica = SpeakingReplica(0, answer, pace_s=0.01)
    requests = ExternalRequests(fleet_of({0: replica}), serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a", 10**6), asked("b", 10**6))
    await gateway.take()
    await gateway.give(ExternalDrop("a"), ExternalDrop("unknown"))
    waiting = asyncio.ensure_future(gateway.take())
    await asyncio.sleep(0)
    await Gateway(requests, "gateway-2").give()
    with pytest.raises(RolloutError, match="another controller, or gateway, uses this actor"):
        while True:
            await waiting
            waiting = asyncio.ensure_future(gateway.take())
    await until(lambda: replica.working == 0 and sorted(replica.stopped) == ["a", "b"])


async def test_a_publication_that_waits_for_running_responses_does_not_wait_for_these() -> None:
    fleet = fleet_of({0: SpeakingReplica(0, answer, pace_s=0.01)})
    requests = ExternalRequests(fleet, serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("a", 10**6))
    await gateway.take()
    await fleet.drain(30.0)  # it would raise
    fleet.admit_joining()
    requests.close()


@pytest.mark.parametrize("known", range(5))
def test_parts_of_a_part(known: int) -> None:
    part = ResponsePart([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4], (VersionSpan(5, 0, 2), VersionSpan(6, 2, 4)), "stop")
    first, rest = first_tokens(part, known, "stop"), tokens_from(part, known)
    assert first.response_ids + rest.response_ids == part.response_ids
    assert join_parts(ResponsePart(first.response_ids, first.logprobs, first.versions), rest) == part


async def test_a_publication_waits_for_the_requests_of_a_group_of_the_run() -> None:
    replica = SpeakingReplica(0, answer, pace_s=0.001)
    fleet = fleet_of({0: replica})
    requests = ExternalRequests(fleet, serves=True)
    gateway = Gateway(requests)
    await gateway.give(asked("outside", 10_000), asked("of a group", 300, of_group=True))
    await until(lambda: all(each.part.response_ids for each in requests._open.values()))
    await fleet.drain(30.0)
    ended = [name for name, each in requests._open.items() if each.part.finish_reason is not None]
    assert ended == ["of a group"] and replica.working == 1
    requests.close()


@pytest.mark.parametrize("policy", ["cut", "fail"])
async def test_the_deadline_of_a_group_holds_for_its_requests(policy: Any) -> None:
    requests = ExternalRequests(fleet_of({0: SpeakingReplica(0, answer, pace_s=0.01)}), serves=True)
    gateway = Gateway(requests)
    late = GroupDeadline(at=0.2, seconds=7.0, policy=policy)
    await gateway.give(asked("late", 10_000, of_group=True, deadline=late))
    end = (await all_news(gateway, {"late"}))["late"]
    if policy == "cut":
        assert end.part.finish_reason == "length" and 0 < len(end.part.response_ids) < 10_000 and not end.failure
    else:
        assert end.failure == "unavailable" and "at the group's deadline of 7 s" in end.error
