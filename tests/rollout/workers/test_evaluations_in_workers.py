"""Evaluations whose loops run in two workers come to what those in the controller come to, also if a worker dies."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from megarl.chat.formats import Prompt
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_run import EVAL_SEED_OFFSET
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.orchestrator.evaluator import PRIORITY, evaluate_on_fleet
from megarl.rollout.resume.group_progress import INTERRUPTED
from megarl.rollout.tasks.prompts import EvalSet, PromptTask
from megarl.rollout.workers.messages import Start
from megarl.rollout.workers.worker_pool import MOST_LOST
from tests.support.agents.scripted_agents import (
    Counter,
    OneProblem,
    ScriptedBatcher,
    call_text,
    ids_of,
    toolbox_of,
)
from tests.support.rollout.fake_workers import Crew
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of

PROBLEMS, SAMPLES = 3, 2
RESPONSES = PROBLEMS * (1 + SAMPLES)
TURNS = (
    f"First.\n{call_text('add', a=1, b=1)}{call_text('book', a=7, b=0)}",
    call_text("add", a=2, b=2),
    "The answer is 4.",
)
CONFIG: Config = config_of("model", batch={"groups": 1, "samples_per_group": 2}, rollout={"agent_workers": 2})


async def nothing() -> None: ...


@dataclass
class Pool:
    """Stands for the fleet: turn i of every dialogue is `TURNS[i]`. `sent`: all requests; `most`: at a time."""

    point: Callable[[], Any] = nothing
    most: int = 0
    now: int = 0

    def __post_init__(self) -> None:
        self.sent: list[tuple[GenerateRequest, Any, int | None]] = []

    async def generate(
        self, context: RequestContext, requests: list[GenerateRequest], **_: Any
    ) -> list[GenerateResult]:
        self.sent += [(each, context.prefix, context.near) for each in requests]
        self.now += len(requests)
        self.most = max(self.most, self.now)
        await self.point()
        self.now -= len(requests)
        return [_result(each) for each in requests]


def _result(request: GenerateRequest) -> GenerateResult:
    """The response's log-probs tell its seed and its prompt, so that requests which differ are noticed."""
    turn = int(request.request_id.split(".")[0].rsplit("-", 1)[1])
    ids = ids_of(TURNS[turn])
    logprob = -1.0 - ((request.seed or 0) % 97 + len(request.prompt_ids) % 13) / 64
    return GenerateResult(request.request_id, ids, [logprob] * len(ids), (VersionSpan(3, 0, len(ids)),), "stop", 1)


class Scene:
    """An evaluation of one set; everything that waits passes `point`, and at point `at` a worker dies."""

    def __init__(self, loop: AgentLoop | None = None, *, workers: bool = True, at: int = -1) -> None:
        self.at, self.seen = at, 0
        self.add, self.book = Counter("add"), Counter("book", idempotent=False)
        self.add.hold = self.book.hold = self.point
        self.pool = Pool(self.point)
        self.box = toolbox_of(self.add, self.book)
        self.loop = loop or ToolAgent()
        prompt = Prompt(0, [{"role": "user", "content": "2 + 2?"}], "4", {})
        ids = self.box.dialogue.start(prompt.messages, self.box.schemas)
        greedy, sampled = SamplingSpec.greedy(1024, (0,)), SamplingSpec(1024, 1.0, (0,))
        problems = [
            PromptTask(prompt, [*ids, *[ids[-1]] * number], sampled, "dev", reward=1) for number in range(PROBLEMS)
        ]
        self.set = EvalSet("dev", problems, greedy, samples=SAMPLES, seed=5)
        source, unused = OneProblem(self.box, 1024), ScriptedBatcher([]).generate
        self.crew = Crew(CONFIG, GroupRunner(CONFIG, self.loop, source, unused, self, toolboxes={"dev": self.box}))
        self.workers = workers

    async def point(self) -> None:
        self.seen += 1
        if self.seen - 1 == self.at:
            self.crew.made[0].die()
        await asyncio.sleep(0)

    async def score(self, sample: RewardInput, function: int = 0) -> RewardResult:
        await self.point()
        assert function == 1, "the reward function of the set"
        return RewardResult(float("4" in sample.response), {"turns": float(len(sample.turns))}, answer="4")

    async def evaluate(self, share: asyncio.Semaphore | None = None) -> SetReport:
        crew, pool = self.crew, cast(Any, self.pool)
        if self.workers:
            await crew.pool.start()
        try:
            workers = crew.pool if self.workers else None
            return await evaluate_on_fleet(self.set, pool, crew.runner.host, workers, version=3, tag="t", share=share)
        finally:
            await crew.pool.close()

    def report(self, share: asyncio.Semaphore | None = None) -> SetReport:
        return asyncio.run(asyncio.wait_for(self.evaluate(share), 30))

    def asked(self) -> list[tuple[Any, ...]]:
        """All that the engines were asked, in an order that does not depend on who was first."""
        received = [(str(each.request_id), each, prefix, near) for each, prefix, near in self.pool.sent]
        # Those that share no beginning are named by the first of their call, which depends on who was first.
        return sorted(
            (name, each, None if isinstance(prefix, str) else prefix, near) for name, each, prefix, near in received
        )


def undisturbed(*, workers: bool) -> tuple[SetReport, Scene]:
    scene = Scene(workers=workers)
    return scene.report(), scene


HERE, SCENE_HERE = undisturbed(workers=False)
POINTS = undisturbed(workers=True)[1].seen


def test_workers_make_the_responses_that_the_controller_makes() -> None:
    report, scene = undisturbed(workers=True)
    assert report == HERE and scene.set.records == SCENE_HERE.set.records and len(scene.set.records) == RESPONSES
    assert scene.asked() == SCENE_HERE.asked() and len(scene.pool.sent) == len(TURNS) * RESPONSES
    assert len(scene.add.calls) == 2 * RESPONSES and len(scene.book.calls) == RESPONSES
    assert HERE.greedy.mean.value == 1.0 and HERE.oldest == HERE.newest == 3
    starts = [[each for each in worker.received if isinstance(each, Start)] for worker in scene.crew.made]
    assert [len(each) for each in starts] == [5, 4], "each of the two has its part"
    assert not scene.crew.pool._runs and not any(worker.loops._runs for worker in scene.crew.made)
    assert {worker.loops.under_way() for worker in scene.crew.made} == {0}
    assert not any(scene.crew.pool._loops.values())


def test_the_controller_admits_their_requests() -> None:
    """Alongside training only so many reach the engines at a time, of a lower priority, wherever the loops are."""
    for workers in (False, True):
        scene = Scene(workers=workers)
        scene.report(asyncio.Semaphore(2))
        assert scene.pool.most == 2 and {each.priority for each, *_ in scene.pool.sent} == {PRIORITY}
    alone = undisturbed(workers=True)[1].pool
    assert alone.most > 2 and {each.priority for each, *_ in alone.sent} == {0}


@pytest.mark.parametrize("at", range(0, POINTS, 3))
def test_a_worker_dies_and_its_responses_go_on_in_another_one(at: int) -> None:
    scene = Scene(at=at)
    report = scene.report()
    assert len(scene.crew.made) == 3 and len(scene.set.records) == RESPONSES
    texts = [turn["text"] for record in scene.set.records for turn in record["turns"]]
    interrupted = texts.count(INTERRUPTED)
    assert RESPONSES - interrupted <= len(scene.book.calls) <= RESPONSES, "none is doubled that must not be repeated"
    assert report.greedy.mean.value == report.sampled.mean.value == 1.0 and not report.failed_generations
    assert len({each.request_id for each, *_ in scene.pool.sent}) == len(scene.pool.sent), "nothing is sampled twice"
    if not interrupted:
        assert report == HERE and scene.set.records == SCENE_HERE.set.records and scene.asked() == SCENE_HERE.asked()


class EndsItsWorker:
    """Ends the worker that runs the greedy response to problem 0 as soon as all others have ended."""

    def __init__(self) -> None:
        self.scene: Scene | None = None
        self.ended = 0

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.seed is None and ctx.group_id == EVAL_SEED_OFFSET:
            assert self.scene is not None
            while self.ended < RESPONSES - 1 or len(self.scene.crew.pool._runs) > 1:
                await asyncio.sleep(0)
            for worker in self.scene.crew.made:
                if worker.loops._runs:
                    worker.die()
            await asyncio.Event().wait()
        row = await ToolAgent().run(ctx)
        self.ended += 1
        return row


def test_a_response_that_ends_every_worker_fails_alone() -> None:
    loop = EndsItsWorker()
    scene = loop.scene = Scene(loop)
    report = scene.report()
    assert len(scene.crew.made) == 2 + MOST_LOST and report.failed_generations == 1
    assert report.first_failure is not None
    assert f"{MOST_LOST} agent workers were lost with the greedy response 0 to problem 0 of dev" in report.first_failure
    assert report.sampled == HERE.sampled


class FailsOnce(ToolAgent):
    """Has a mistake in one response."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.group_id == EVAL_SEED_OFFSET + 1 and ctx.seed is None:
            raise KeyError("no such thing")
        return await super().run(ctx)


@pytest.mark.parametrize("workers", [False, True])
def test_a_mistake_of_the_loop_ends_the_evaluation_with_its_own_words(workers: bool) -> None:
    scene = Scene(FailsOnce(), workers=workers)
    with pytest.raises(Exception, match="no such thing") as caught:
        scene.report()
    assert type(caught.value).__name__ == "KeyError"
    assert not scene.crew.pool._runs


async def test_an_evaluation_that_is_given_up_leaves_nothing_in_the_workers() -> None:
    scene = Scene()
    held = asyncio.Event()
    scene.pool.point = held.wait
    pool = scene.crew.pool
    evaluation = asyncio.ensure_future(scene.evaluate())
    while len(scene.pool.sent) < RESPONSES:
        await asyncio.sleep(0)
    assert "agent worker 0 has 0 groups and 5 responses of an evaluation" in pool.waiting()
    close, pool.close = pool.close, nothing  # type: ignore[method-assign]
    evaluation.cancel()
    await asyncio.wait({evaluation})
    assert not pool._runs
    while any(worker.loops._runs for worker in scene.crew.made):
        await asyncio.sleep(0.01)
    await close()
