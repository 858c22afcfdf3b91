"""The parts of a rollout controller without engines: prompts, rewards, a fleet and a queue in this process.

`local_controller(config, directory)` is a real `RolloutController` that is joined to them, outside Ray.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.chat.formats import Prompt
from megarl.config.schema import Config
from megarl.queue.routes import Routes
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.loop_host import LoopHost, SingleTurn
from megarl.rollout.agents.loop_run import RunningGroups
from megarl.rollout.engine.continuation import RequestContext, ResponseCollector
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.fleet.engine_pool import RequestCoalescer
from megarl.rollout.fleet.external_requests import ExternalRequests
from megarl.rollout.orchestrator import pool_controller
from megarl.rollout.orchestrator.controller import RolloutController
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile
from megarl.rollout.resume.journal_records import read_head
from megarl.rollout.tasks.prompts import PromptTask

VERSION = 4  # of the weights that the fake batcher serves
ENGINE_S = 0.25


def response(request: GenerateRequest, version: int = VERSION) -> GenerateResult:
    """Return as many tokens as the request's prompt has."""
    ids = [9] * len(request.prompt_ids)
    spans = (VersionSpan(version, 0, len(ids)),)
    return GenerateResult(request.request_id, ids, [-0.5] * len(ids), spans, "stop", 0, ENGINE_S)


@dataclass
class FakeBatcher:
    """Answers every request at once, and keeps it with the prefix and the home that it was sent with."""

    asked: list[tuple[GenerateRequest, Any, int | None]] = field(default_factory=list)
    deadlines: list[Any] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        self.asked.append((request, context.prefix, context.home))
        self.deadlines.append(context.deadline)
        return response(request)


class FakeSource:
    """The prompt of group g has g + 1 tokens."""

    stop_token_ids = (2,)
    skipped = 3
    sampling = SamplingSpec(16, 1.0, stop_token_ids)

    def __init__(self) -> None:
        self.finished: dict[int, list[float]] = {}
        self.committed: list[tuple[list[int], int, int]] = []  # groups, steps done, first group not admitted
        self.resumed_at: list[tuple[int, int, int]] = []  # arguments of the resumes
        self.sets: dict[int, str] = {}  # the data sets of groups, if there are several
        self.curriculum: Callable[[], Awaitable[None]] | None = None  # what a commit waits for

    def draw(self, group_id: int) -> PromptTask:
        prompt = Prompt(group_id, [{"role": "user", "content": f"question {group_id}"}], self.reference(group_id), {})
        return PromptTask(prompt, [5] * (group_id + 1), self.sampling, self.dataset(group_id))

    def dataset(self, group_id: int) -> str:
        return self.sets.get(group_id, "")

    def finish(self, group_id: int, rewards: Sequence[float]) -> None:
        self.finished[group_id] = list(rewards)

    def rewards(self, groups: Iterable[int]) -> dict[int, float | None]:
        """The last reward of each group, which stands for their mean."""
        return {group: self.finished[group][-1] for group in groups if self.finished.get(group)}

    async def commit(
        self, groups: Iterable[int], steps: int, next_group: Callable[[], int], first_open: Callable[[], int]
    ) -> None:
        if self.curriculum is not None:
            await self.curriculum()
        assert first_open() <= next_group()
        self.committed.append((list(groups), steps, next_group()))

    def reset(self) -> None:
        self.finished, self.committed, self.resumed_at = {}, [], []

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)

    def decode_all(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in sequences]

    def reference(self, group_id: int) -> str:
        return f"answer {group_id}"

    def eval_sets(self) -> list[Any]:
        return []

    async def close_tools(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"seed": 0}

    def load_state_dict(self, state: dict[str, Any], next_group: int, steps: int, unsettled: int = 0) -> None:
        if state != self.state_dict():
            raise ValueError("the saved prompts are other ones")
        self.resumed_at.append((next_group, steps, unsettled))


class FakeRewards:
    """The reward is the length of the text, or the next one of `script`; `failure` is raised if it is set."""

    def __init__(self) -> None:
        self.script: dict[int, list[float | RewardResult]] = {}  # by length of the text, which tells the group
        self.failure: Exception | None = None

    async def score(self, judged: RewardInput, function: int = 0) -> RewardResult:
        if self.failure is not None:
            raise self.failure
        script = self.script.get(len(judged.response))
        reward = script.pop(0) if script else float(len(judged.response))
        return reward if isinstance(reward, RewardResult) else RewardResult(reward)

    def waiting(self) -> str:
        return "; waiting for the reward of 3 samples"

    def close(self) -> None: ...


def numbered_routes(start: int, end: int) -> Routes:
    """The experts of the tokens from `start` to `end`: the token's place, and the next number."""
    places = np.arange(start, end, dtype=np.uint8)
    return Routes(np.stack([places, places + 1], -1)[:, None])


@dataclass
class FakeFleet:
    """One replica. `failures`: the errors of requests by group; `held`: groups whose responses never end.

    One token is reported of the first `reports` responses of a group that is held. `sent`: what the replica was asked
    by group.
    `version`: returns that of the weights which it serves. `routes`: it returns experts, see `numbered_routes`.
    """

    version: Callable[[], int] = lambda: VERSION

    failures: dict[int, Exception] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reports: int = 0
    routes: bool = False
    sent: dict[Any, list[GenerateRequest]] = field(default_factory=dict)
    serving: list[int] = field(default_factory=lambda: [0])
    idle: list[int] = field(default_factory=list)
    lost: dict[int, Exception] = field(default_factory=dict)
    resets: int = 0
    joined: int = 0
    in_sync: bool = False
    needs_publication: str = ""
    publishes: list[bool] = field(default_factory=list)  # whether a trainer does, as it was asked
    drained: list[float] = field(default_factory=list)  # the bounds of all calls
    taken_over: list[bool] = field(default_factory=list)

    async def generate(
        self, context: RequestContext, requests: Sequence[GenerateRequest], *, background: bool = False,
        terms: Any = None,
    ) -> list[GenerateResult]:  # fmt: skip
        version, responses, prefix = self.version(), ResponseCollector(requests, context.tokens), context.prefix
        sent = responses.send(0)
        self.sent.setdefault(prefix, []).extend(sent)
        if prefix in self.held:
            span = (VersionSpan(version, 0, 1),)
            parts = [ResponsePart([8], [-0.25], span, routes=self._routes(each, 1)) for each in sent[: self.reports]]
            responses.add({each.request_id: part for each, part in zip(sent, parts, strict=False)})
            await asyncio.Event().wait()
        if prefix in self.failures:
            raise self.failures[prefix]
        for request in sent:
            each = response(request, version)
            routes = self._routes(request, len(each.response_ids))
            part = ResponsePart(each.response_ids, each.logprobs, each.versions, "stop", ENGINE_S, routes=routes)
            responses.add({each.request_id: part})
        return [replace(each, replica=0) for each in responses.results()]

    def _routes(self, request: GenerateRequest, tokens: int) -> Routes | None:
        if not self.routes or request.routes_from is None:
            return None
        return numbered_routes(request.routes_from, len(request.prompt_ids) + tokens - 1)

    def expect_publication(self, publishes: bool) -> None:
        self.publishes.append(publishes)

    def take_load(self) -> EngineLoad:
        return EngineLoad(0.5, 3, 1)

    def take_rates(self) -> dict[str, float]:
        return {"rollout/replica_tokens_per_second/0": 100.0}

    async def drain(self, timeout_s: float) -> None:
        self.drained.append(timeout_s)

    async def may_begin(self) -> None: ...

    async def begin_sync(self) -> None:
        self.in_sync = True

    def admit_joining(self) -> None:
        self.joined += 1
        self.in_sync = False

    async def reset(self) -> None:
        self.resets += 1

    async def take_over(self, *, in_sync: bool) -> None:
        self.taken_over.append(in_sync)


@dataclass
class FakeQueue:
    """The rows of the queue by key; `groups` are the groups in the order in which they were written."""

    rows: dict[str, Trajectory] = field(default_factory=dict)
    groups: list[Sequence[Trajectory]] = field(default_factory=list)
    failure: Exception | None = None

    async def put_group(
        self, rows: Sequence[Trajectory], files: Mapping[str, bytes] | None = None, *, more: bool = False
    ) -> None:
        if self.failure is not None:
            raise self.failure
        self.groups.append(rows)
        self.rows |= {row.key: row for row in rows}

    async def clear(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    async def clear_all(self) -> None:
        self.rows.clear()

    async def check(self, timeout_s: float) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None: ...


class FakeElasticPool:
    """A pool that nothing is missing from."""

    is_open = False

    def open(self) -> None:
        self.is_open = True

    async def tend(self) -> None:
        pass


@dataclass
class LocalController:
    """A controller with its fake parts."""

    controller: RolloutController
    fleet: FakeFleet
    queue: FakeQueue
    rewards: FakeRewards


def local_controller(
    config: Config,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop: AgentLoop | None = None,
    *,
    fleet: Any = None,
) -> LocalController:
    """Return a started controller whose run directory is `directory`; its constructor redirects no output.

    `fleet`: a real one; None: a `FakeFleet`.
    """
    monkeypatch.setattr(pool_controller, "redirect_output", lambda path: None)
    spec = ReplicaSpec(config.model_dump_json(), str(directory), "run", cuda=False, max_model_len=64, supervisor=None)
    made: Any = RolloutController(spec, "run.0")
    queue, source, rewards = FakeQueue(), FakeSource(), FakeRewards()
    if fleet is None:
        fleet = FakeFleet(lambda: made._admission.version)
    coalescer = RequestCoalescer(fleet, clock=made._engine_time)
    made._fleet, made._writer, made._queue, made._source, made._rewards = fleet, queue, queue, source, rewards
    made._coalescer = coalescer
    made._external_requests = ExternalRequests(fleet, serves=False)
    loop = loop or SingleTurn()
    persist = made._journal.persist
    made._running = RunningGroups(config, source, coalescer.generate, "run.0", persist=persist)  # type: ignore[arg-type]
    made._host = LoopHost(loop, rewards, source.decode_all, timeout_s=config.timeouts.rpc_s)  # type: ignore[arg-type]
    made._loop = loop
    made.elastic = FakeElasticPool()  # type: ignore[assignment]
    made._join()
    return LocalController(made, fleet, queue, rewards)


def journalled(directory: Path) -> list[int]:
    """Return the finished groups in the journal of a run directory, sorted; a group counts once for each record."""
    heads = [read_head(record) for record in JournalFile(directory / JOURNAL_FILE).read()]
    return sorted(head["group"] for head in heads if head["kind"] == "group")
