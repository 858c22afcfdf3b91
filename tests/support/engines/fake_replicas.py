"""Replicas without processes, for tests of the fleet."""

import asyncio
from collections.abc import Callable
from typing import Any

from megarl.common.errors import ReplicaFailed
from megarl.config.schema import TimeoutsConfig
from megarl.queue.trajectory import FinishReason, VersionSpan
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.transport.link import LinkServer
from megarl.rollout.transport.rpc import Reply, RpcServer

SPEC = SamplingSpec(4, 1.0, (2,))


class Method:
    def __init__(self, function: Any) -> None:
        self.function = function

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self.function(*args))


class SharesCalls:
    """Takes calls as an engine's actor does, and makes them of its own methods."""

    _link: LinkServer[Reply] | None = None

    @property
    def give(self) -> Method:
        if self._link is None:
            make_call = lambda method, args: getattr(self, method).remote(*args)  # noqa: E731
            self._link = RpcServer(make_call, gather_s=0.0).link
        return Method(self._link.give)

    @property
    def take(self) -> Method:
        assert self._link is not None
        return Method(self._link.take)


class FakeReplica(SharesCalls):
    """Answers each request with one token, its index, after `delay_s`, or raises `error`; a reset does that too.

    `said`: the reasons for which it had to refuse every call.
    """

    def __init__(self, index: int, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self.index, self.error, self.delay_s = index, error, delay_s
        self.served: list[list[str]] = []
        self.said: list[str] = []
        self.generate, self.reset, self.fail = Method(self._generate), Method(self._reset), Method(self._fail)

    async def _reset(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error

    async def _fail(self, reason: str) -> None:
        await self._reset()
        self.said.append(reason)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.served.append([request.request_id for request in requests])
        spans = (VersionSpan(3, 0, 1),)
        part = ResponsePart([self.index], [-0.5], spans, "stop", 0.25)
        return {request.request_id: part for request in requests}, EngineLoad()


def requests(group: int, n: int = 2) -> list[GenerateRequest]:
    return [GenerateRequest(f"{group}.{i}", [1], SPEC) for i in range(n)]


def answered(results: list[GenerateResult]) -> list[str]:
    return [f"{result.replica}:{result.request_id}" for result in results]


def fleet_of(
    replicas: dict[int, Any],
    new: FakeReplica | None = None,
    *,
    generate_s: float = 5.0,
    rpc_s: float = 5.0,
    interval_s: float = 5.0,
    describe: Callable[[int], str] = str,
) -> EnginePool:
    """A fleet whose restarts give `new`."""

    async def restart(index: int, old: Any) -> Any:
        assert old is replicas[index]
        return new

    timeouts = TimeoutsConfig(generate_s=generate_s, rpc_s=rpc_s)
    return EnginePool(
        replicas,
        timeouts,
        restart,  # type: ignore[arg-type]
        describe,
        report_interval_s=interval_s,
        sync_restarts=1,
    )


class ScriptedReplica(SharesCalls):
    """Makes token `index` for its requests, one per report; `rounds` reports, then `outcome`, or silence.

    When it is asked to end requests, it gives two more tokens, or raises `refusal`.
    """

    def __init__(
        self, index: int, rounds: int, outcome: Exception | FinishReason | None, version: int = 3,
        refusal: Exception | None = None,
    ) -> None:  # fmt: skip
        self.index, self.rounds, self.outcome, self.version, self.refusal = index, rounds, outcome, version, refusal
        self.asked: list[GenerateRequest] = []
        self.reported: list[dict[str, int]] = []
        self.ended: list[dict[str, int]] = []
        self.generate, self.report, self.end = Method(self._generate), Method(self._report), Method(self._end)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        self.asked += requests
        return await self._report({request.request_id: 0 for request in requests}, wait_s)

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        self.reported.append(reported)
        await asyncio.sleep(0)
        last = len(self.reported) > self.rounds
        if last and self.outcome is None:
            await asyncio.Event().wait()
        if last and isinstance(self.outcome, Exception):
            raise self.outcome
        finish_reason: Any = self.outcome if last else None
        spans = (VersionSpan(self.version, 0, 1),)
        logprob = -0.1 * len(self.reported)
        part = ResponsePart([self.index], [logprob], spans, finish_reason, seconds=len(self.reported))
        return dict.fromkeys(reported, part), EngineLoad()

    async def _end(self, reported: dict[str, int]) -> EngineReport:
        self.ended.append(reported)
        if self.refusal is not None:
            raise self.refusal
        part = ResponsePart([7, 7], [-0.5, -0.5], (VersionSpan(self.version, 0, 2),), "abort")
        return dict.fromkeys(reported, part), EngineLoad()


class HoldingReplica(SharesCalls):
    """Makes a token per millisecond of a clock that stands still between reports, and lacks the last ones in a report.

    It is lost when its report number `lost_after` is due. `hold_s`: for how long its engine holds tokens.
    """

    def __init__(self, hold_s: float, lost_after: int) -> None:
        self.hold_s, self.lost_after = hold_s, lost_after
        self.now_s, self.calls = 0.0, 0
        self.generate, self.report = Method(self._generate), Method(self._report)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        return await self._report({request.request_id: 0 for request in requests}, wait_s)

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        await asyncio.sleep(0)
        self.now_s, self.calls = self.now_s + wait_s, self.calls + 1
        if self.calls > self.lost_after:
            raise ReplicaFailed(0, "it died")
        sent = int(1000 * (self.now_s - self.hold_s))
        parts = {}
        for name, known in reported.items():
            new = sent - known
            parts[name] = ResponsePart([7] * new, [-0.1] * new, (VersionSpan(3, 0, new),) if new else ())
        return parts, EngineLoad()
