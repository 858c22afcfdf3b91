"""Engines without processes that make one token per report, of the version of the weights that they have then."""

import asyncio
from dataclasses import dataclass, field

from megarl.common.errors import ReplicaFailed
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from tests.support.engines.fake_replicas import Method, SharesCalls


@dataclass
class VersionedEngine(SharesCalls):
    """Works when it is given turns: each call waits for `turn`. A request ends with its `max_tokens`-th token."""

    index: int
    version: int = 0
    dead: bool = False
    left: dict[str, int] = field(default_factory=dict)  # tokens to make, by request that is running

    def __post_init__(self) -> None:
        self.turn = asyncio.Event()
        self.generate, self.report = Method(self._generate), Method(self._report)
        self.end = self.fail = self.reset = Method(self._refuse)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        self.left |= {request.request_id: request.sampling.max_tokens for request in requests}
        return await self._make([request.request_id for request in requests])

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        return await self._make(list(reported))

    async def _make(self, names: list[str]) -> EngineReport:
        await self.turn.wait()
        if self.dead:
            raise ReplicaFailed(self.index, f"replica {self.index} is dead")
        parts = {}
        for name in names:
            self.left[name] -= 1
            ended = None if self.left[name] else "length"
            parts[name] = ResponsePart([self.index], [-0.5], (VersionSpan(self.version, 0, 1),), ended)  # type: ignore[arg-type]
        return parts, EngineLoad()

    async def _refuse(self, *_: object) -> None:
        raise ReplicaFailed(self.index, f"replica {self.index} is dead")

    async def give_turns(self, count: int = 1) -> None:
        """Let all calls that wait make a token, `count` times."""
        for _ in range(count):
            await settle()
            self.turn.set()
            await asyncio.sleep(0)
            self.turn = asyncio.Event()
        await settle()


async def settle() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(40):
        await asyncio.sleep(0)


def of_length(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(name, [1], SamplingSpec(tokens, 1.0, ()), seed=0)
