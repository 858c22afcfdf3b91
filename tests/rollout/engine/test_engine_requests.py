"""Requests on an engine whose tokens the test makes one by one, kept as vLLM's front end keeps them."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.engine_load import EngineMonitor
from megarl.rollout.engine.engine_requests import EngineRequests
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec


class State:
    """The fields of vLLM's RequestState that are read."""

    def __init__(self) -> None:
        self.detokenizer = SimpleNamespace(output_token_ids=[])
        self.logprobs_processor = SimpleNamespace(logprobs=SimpleNamespace(logprobs=[], token_ids=[]))
        self.versions: list[str] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _weight_version_spans(self) -> list[Any]:
        return [SimpleNamespace(version=each, start=at, end=at + 1) for at, each in enumerate(self.versions)]


class FakeEngine:
    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids=defaultdict(list))
        self.aborted: list[str] = []
        self.salts: dict[str, str | None] = {}

    def make(self, name: str, token: int, logprob: float | None = -0.5, version: str = "3") -> None:
        state = self.output_processor.request_states[f"{name}-1"]
        state.detokenizer.output_token_ids.append(token)
        state.logprobs_processor.logprobs.token_ids.append(token)
        state.logprobs_processor.logprobs.logprobs.append(logprob)
        state.versions.append(version)

    def finish(self, name: str, reason: str) -> None:
        self.output_processor.request_states[f"{name}-1"].end.set_result(reason)

    async def generate(self, prompt: Any, parameters: Any, request_id: str, priority: int = 0) -> AsyncIterator[Any]:
        state = State()
        self.salts[request_id] = prompt.get("cache_salt")
        self.output_processor.request_states[f"{request_id}-1"] = state
        self.output_processor.external_req_ids[request_id].append(f"{request_id}-1")
        try:
            reason = await state.end
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            del (
                self.output_processor.request_states[f"{request_id}-1"],
                self.output_processor.external_req_ids[request_id],
            )
        response = SimpleNamespace(
            token_ids=state.detokenizer.output_token_ids,
            logprobs=state.logprobs_processor.logprobs,
            weight_versions=state._weight_version_spans(),
            finish_reason=reason,
        )
        yield SimpleNamespace(outputs=[response])


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1, 2], SamplingSpec(8, 1.0, (9,)), seed=0)


async def started(*names: str, monitor: EngineMonitor | None = None) -> tuple[FakeEngine, EngineRequests]:
    engine = FakeEngine()
    requests = EngineRequests(engine, 3, monitor or EngineMonitor(), silence_s=60.0)  # type: ignore[arg-type]
    requests.start([request(name) for name in names])
    await asyncio.sleep(0)
    return engine, requests


async def test_a_report_comes_at_once_when_all_have_ended() -> None:
    engine, requests = await started("a", "b")
    for name in "ab":
        engine.make(name, 7)
        engine.finish(name, "stop" if name == "a" else "length")
    parts = await asyncio.wait_for(requests.report({"a": 0, "b": 0}, math.inf), 1)
    assert [(part.response_ids, part.finish_reason) for part in parts.values()] == [([7], "stop"), ([7], "length")]
    with pytest.raises(RequestFailed, match="replica 3 does not know request a"):
        await requests.report({"a": 1}, 0.0)


async def test_after_the_wait_each_report_has_the_tokens_since_the_last_one() -> None:
    engine, requests = await started("a", "b")
    engine.make("a", 7, -0.25, version="default")
    first = await requests.report({"a": 0, "b": 0}, 0.01)
    assert (first["a"].response_ids, first["a"].logprobs) == ([7], [-0.25])
    assert first["a"].versions == (VersionSpan(-1, 0, 1, replica=3),) and first["a"].seconds >= 0.01
    assert first["b"].response_ids == [] and {part.finish_reason for part in first.values()} == {None}
    engine.make("a", 8, version="4")
    engine.make("a", 9, version="4")
    engine.make("b", 5)
    engine.finish("a", "stop")
    second = await requests.report({"a": 1, "b": 0}, 0.01)
    assert second["a"].response_ids == [8, 9] and second["a"].finish_reason == "stop"
    assert second["a"].versions == (VersionSpan(4, 0, 1, replica=3), VersionSpan(4, 1, 2, replica=3))
    assert second["b"].response_ids == [5] and second["b"].finish_reason is None


async def test_the_end_of_unfinished_requests_gives_their_last_tokens_and_stops_the_engine() -> None:
    engine, requests = await started("a", "b", "c")
    for token in (7, 8):
        engine.make("a", token)
    engine.make("b", 9)
    engine.finish("b", "stop")
    parts = await requests.end({"a": 1, "b": 0})
    assert (parts["a"].response_ids, parts["a"].finish_reason) == ([8], "abort")
    assert (parts["b"].response_ids, parts["b"].finish_reason) == ([9], "stop")
    await asyncio.sleep(0)
    assert engine.aborted == ["a"]
    requests.start([request("a")])  # its id is free again
    requests.drop()
    await asyncio.sleep(0)
    assert "c" in engine.aborted


def test_requests_that_start_after_new_weights_share_no_prefix_with_those_before() -> None:
    """If the cache is kept: else a prompt that was computed with old weights would be taken for one of the new ones."""

    async def run() -> dict[str, str | None]:
        engine, requests = await started("a", "b")
        for name in ("c", "d"):
            requests.keep_cache()
            requests.start([request(name)])
            await asyncio.sleep(0)
        requests.start([request("e")])
        await asyncio.sleep(0)
        return engine.salts

    salts = asyncio.run(run())
    assert salts["a"] == salts["b"] and salts["d"] == salts["e"] and len({salts[name] for name in "acd"}) == 3


async def test_a_request_that_fails_is_an_error_at_once_and_stops_those_of_its_call() -> None:
    engine, requests = await started("a", "b", "other")
    engine.output_processor.request_states["b-1"].end.set_exception(ValueError("too long"))
    with pytest.raises(ValueError, match="too long"):
        await asyncio.wait_for(requests.report({"a": 0, "b": 0}, math.inf), 1)
    await asyncio.sleep(0)
    assert engine.aborted == ["a"]
    assert (await requests.report({"other": 0}, 0.0))["other"].finish_reason is None


async def test_ids_are_unique_and_every_token_has_its_log_prob() -> None:
    engine, requests = await started("a")
    with pytest.raises(RequestFailed, match="works on request a already"):
        requests.start([request("b"), request("a")])
    with pytest.raises(RequestFailed, match="b"):
        await requests.report({"b": 0}, 0.0)  # it was not begun either
    engine.make("a", 7, None)
    assert math.isnan((await requests.report({"a": 0}, 0.0))["a"].logprobs[0])
    engine.output_processor.request_states["a-1"].detokenizer.output_token_ids.append(8)
    with pytest.raises(ReplicaFailed, match="replica 3 gave 1 log-probs for 2 tokens of a"):
        await requests.report({"a": 1}, 0.0)


async def test_an_engine_that_makes_no_step_is_named_and_one_that_is_paused_is_not() -> None:
    clock = [time.monotonic()]
    monitor = EngineMonitor(lambda: clock[0])
    engine, requests = await started("a", "b", monitor=monitor)
    clock[0] += 50.0
    monitor.record(None)
    clock[0] += 50.0
    await requests.report({"a": 0}, 0.0)
    monitor.hold("pause")
    clock[0] += 500.0
    await requests.report({"a": 0}, 0.0)
    monitor.release("pause")
    clock[0] += 61.0
    with pytest.raises(ReplicaFailed, match="engine of replica 3 has made no step for 61 s; 2 requests wait for it"):
        await requests.report({"a": 0}, 0.0)
    with pytest.raises(ReplicaFailed, match="has made no step for 61 s"):
        await requests.end({"a": 0, "b": 0})
    engine.finish("a", "stop")
    assert (await requests.report({"a": 0}, 1.0))["a"].finish_reason == "stop"  # it owes nothing for this one
