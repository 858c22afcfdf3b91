"""The loop host: creates the config's loop and runs it in this process, the controller or an agent worker."""

import asyncio
import importlib
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from megarl.common.errors import RequestFailed, RolloutError, ToolFailed, TrajectoryFull
from megarl.common.imports import imported
from megarl.common.trust.secret_references import resolved
from megarl.config.schema import ModelConfig, TrainerConfig
from megarl.config.schema.agent import HARNESS, SINGLE_TURN, TOOL_AGENT, AgentConfig
from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.models.hf.read_config import load_info
from megarl.queue.routes import RoutesSpec
from megarl.queue.trajectory import Trajectory
from megarl.rewards.builtin.gsm8k import final_number
from megarl.rewards.builtin.math import last_boxed
from megarl.rewards.types import RewardResult, Turn
from megarl.rewards.worker_pool import RewardPool
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_run import LoopRun
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.agents.trajectory_builder import (
    fail_without_routes,
    failed_trajectory,
    sample_rows,
    trajectory,
)
from megarl.rollout.engine.messages import GenerateResult
from megarl.rollout.engine.teachers.teacher_client import Teachers
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.rollout.transport.background import CANCEL_S
from megarl.rollout.transport.gather import BatchDecoder


@dataclass(frozen=True)
class EvaluatedResponse:
    """A loop's result in an evaluation. `record`: its line in `eval_LABEL.jsonl`; `versions`: of its tokens."""

    scored: ScoredResponse
    record: dict[str, Any]
    versions: frozenset[int]


class EvalContext(AgentContext):
    """The context of one response to a held-out problem. A resume discards it."""

    _text, _outcome, _turns = "", RewardResult(0.0), tuple[Turn, ...]()

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardResult | None:
        """See `AgentContext.judge`."""
        self._turns = tuple(turns)
        self._text, self._outcome = await self._judged(result, turns)
        return self._outcome

    async def ended(self, made: Trajectory | Sequence[Trajectory]) -> EvaluatedResponse:
        """Return the loop's result; if there are several trajectories, report the longest."""
        rows = sample_rows(made, *self.place)
        longest = max(rows, key=lambda row: len(row.response_ids))
        versions = frozenset(span.version for row in rows for span in row.versions if span.version >= 0)
        return EvaluatedResponse(self._scored(longest), await self._line(longest), versions)

    def _scored(self, row: Trajectory) -> ScoredResponse:
        """Return what the report needs of the loop's trajectory."""
        failure = None
        error = self._outcome.error
        if row.status == "failed" and row.failure != error:  # otherwise the reward dropped its sample
            failure = SampleFailure("generation", row.failure)
        elif error is not None:
            failure = SampleFailure("reward", error)
        return ScoredResponse(
            score=row.reward,
            answer=answer_of(self._text, self._outcome),
            tokens=len(row.response_ids),
            truncated=row.finish_reason == "length",
            failure=failure,
        )

    async def _line(self, row: Trajectory) -> dict[str, Any]:
        """Return the line of `eval_LABEL.jsonl`; `response` is the model's last turn."""
        place = self._run.job.evaluated
        assert place is not None
        turns = {"turns": [asdict(turn) for turn in self._turns]} if self._toolbox is not None else {}  # of an agent
        return {
            "index": place.index,
            "mode": place.mode,
            "sample": place.sample,
            "prompt": await self._decoder.text(self.prompt.ids),
            "response": self._text,
            **turns,
            "reference": self.prompt.answer,
            "score": row.reward,
            "components": row.reward_components,
            "error": self._outcome.error,
            "finish_reason": row.finish_reason,
            "response_tokens": len(row.response_ids),
            "versions": [[span.version, span.start, span.end] for span in row.versions],
        }


def answer_of(text: str, outcome: RewardResult) -> str | None:
    """Return the final answer as a string for voting; None if there is none.

    It is the answer the reward function judged. If the function returns none, it is the content of the last box, else
    the last number.
    """
    if outcome.answer is not None:
        return outcome.answer
    if outcome.error is not None or outcome.components.get("parsed", 1.0) == 0.0:
        return None
    boxed = last_boxed(text)
    if boxed is not None:
        return "".join(boxed.split())
    number = final_number(text)
    return None if number is None else str(number)


logger = logging.getLogger(__name__)

# How long a finished group's loops may take to end; the group's canceller waits longer.
END_S = CANCEL_S / 2


class Demonstrate:
    """Returns the data's demonstrations, one per sample, unscored and without an engine. The loss term is `ce`."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the demonstration with the sample's number."""
        given = ctx.prompt.demonstrations[ctx.sample_index]
        return Trajectory(
            group_id=ctx.group_id,
            sample_index=ctx.sample_index,
            prompt_ids=given.prompt_ids,
            response_ids=given.response_ids,
            rollout_logprobs=[0.0] * len(given.response_ids),
            versions=(),
            finish_reason="stop",
            reward=0.0,
            demonstrated=True,
        )


LoopResult = Trajectory | Sequence[Trajectory]


class LoopHost:
    """Runs the loops of any number of groups and evaluation responses at once.

    `loop`: the run's loop. `toolboxes`, `eval_toolboxes`: of training and held-out sets, by name.
    """

    def __init__(
        self,
        loop: AgentLoop,
        rewards: RewardPool,
        decode_all: Callable[[Sequence[Sequence[int]]], list[str]],
        *,
        timeout_s: float,
        toolboxes: Mapping[str, Toolbox] | None = None,
        eval_toolboxes: Mapping[str, Toolbox] | None = None,
        teachers: Teachers | None = None,
        routes: RoutesSpec | None = None,
    ) -> None:
        """`decode_all`: decodes token ids; `timeout_s`: its time limit. `teachers`: those with engines.

        `routes`: the experts each trajectory must have; None: none.
        """
        self.loop, self.rewards, self.teachers, self._routes = loop, rewards, teachers, routes
        self._decoder = BatchDecoder(decode_all, timeout_s)
        self._toolboxes, self._eval_toolboxes = toolboxes or {}, eval_toolboxes or {}

    async def run_group(self, run: LoopRun) -> list[Trajectory]:
        """Return the trajectories of a group by sample and part.

        Raises the first failed loop's exception, and RolloutError if loops still run after the deadline's grace period,
        under either policy.
        """
        job = run.job
        loop = Demonstrate() if job.prompt.demonstrations else self.loop
        toolbox = self._toolboxes.get(job.prompt.dataset)
        contexts = [AgentContext(run, index, toolbox, self.rewards, self._decoder) for index in job.samples]
        results = await _ended([_run_sample(loop, each) for each in contexts], run, loop)
        samples = [
            [each.with_images(row) for row in sample_rows(made, *each.place)]
            for each, made in zip(contexts, results, strict=True)
        ]
        if self._routes is not None:
            samples = [fail_without_routes(rows, self._routes) for rows in samples]
        return await self._taught(_of_set([row for rows in samples for row in rows], job.prompt.dataset), run)

    async def respond(self, run: LoopRun) -> EvaluatedResponse:
        """Run one response's loop; a failed tool or request costs only this response."""
        context = self._eval_context(run)
        try:
            made = await self.loop.run(context)
        except (ToolFailed, RequestFailed) as error:
            return await self.failed(run, error)
        return await context.ended(made)

    async def failed(self, run: LoopRun, error: Exception) -> EvaluatedResponse:
        """Return the result of a response whose loop failed; in training, its group would fail."""
        context = self._eval_context(run)
        return await context.ended(failed_trajectory(*context.place, str(error)))

    def _eval_context(self, run: LoopRun) -> EvalContext:
        toolbox = self._eval_toolboxes.get(run.job.prompt.dataset)
        return EvalContext(run, run.job.samples[0], toolbox, self.rewards, self._decoder)

    async def _taught(self, rows: list[Trajectory], run: LoopRun) -> list[Trajectory]:
        """Return a group's rows with the teacher's log-probs, if its data set has a teacher with engines."""
        dataset = run.job.prompt.dataset
        if self.teachers is None or not self.teachers.scores(dataset):
            return rows
        if any(row.images for row in rows):  # from tools: prompts with images are refused at startup
            raise RolloutError("engines of teachers are shown no images; set where: trainer (teachers)")
        started = time.monotonic()
        rows = await self.teachers.teach(rows, dataset)
        run.stats.teacher_seconds.append(time.monotonic() - started)
        return rows


async def _run_sample(loop: AgentLoop, context: AgentContext) -> LoopResult:
    try:
        result = await loop.run(context)
    except TrajectoryFull as full:  # only this sample is full; others in the group may be shorter
        context.note_end(context.turns, overflow=True)
        result = failed_trajectory(*context.place, str(full))
    context.note_times()
    return result


async def _ended(loops: Sequence[Coroutine[Any, Any, LoopResult]], run: LoopRun, loop: AgentLoop) -> list[LoopResult]:
    """Return the results of a group's loops. The first failure, or the end of the grace period, cancels the others.

    Loops that ignore cancellation are abandoned after `END_S`.
    """
    deadline = run.deadline
    left_s = None if deadline is None else max(0.0, deadline.at + deadline.grace_s - time.monotonic())
    tasks = [asyncio.ensure_future(each) for each in loops]
    try:
        ended, late = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in ended and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if late and deadline is not None:
            raise RolloutError(
                f"the loop {type(loop).__module__}:{type(loop).__qualname__} had not ended in all samples of group "
                f"{run.job.group} {deadline.grace_s:g} s after the group's deadline of {deadline.seconds:g} s "
                "(rollout.group_deadline_s); a loop must end by `ctx.deadline`"
            )
        return [task.result() for task in tasks]
    finally:
        if any(not task.done() or task.cancelled() or task.exception() for task in tasks):
            await _end(tasks, run)


async def _end(tasks: Sequence[asyncio.Future[LoopResult]], run: LoopRun) -> None:
    """Cancel the loops of a finished group; see `_ended`."""
    for task in tasks:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else retrieves it
    if open_tasks := [task for task in tasks if not task.done()]:
        _, left = await asyncio.wait(open_tasks, timeout=END_S)
        if left:
            logger.error("%d loops of %s ignore their cancellation and keep running", len(left), run.job)


def failed_group(group_id: int, samples: int, dataset: str, reason: str) -> list[Trajectory]:
    """Return the trajectories of a group that could not run: no tokens, counted but never trained on."""
    return _of_set([failed_trajectory(group_id, index, reason) for index in range(samples)], dataset)


def _of_set(rows: list[Trajectory], dataset: str) -> list[Trajectory]:
    """Return the trajectories with their data set's name, which is empty if the run has only one."""
    return [replace(row, dataset=dataset) for row in rows] if dataset else rows


class SingleTurn:
    """Samples one response to the prompt and scores it."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of one response."""
        result = await ctx.generate(ctx.prompt.ids)
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)


def routes_spec(trainer: TrainerConfig, model: ModelConfig) -> RoutesSpec | None:
    """Return the shape of the routes the trainer replays; None unless `trainer.router_replay` is r3."""
    if trainer.router_replay != "r3":
        return None
    info = load_info(model.path)
    return RoutesSpec(sum(info.moe_layers), info.topk, info.num_experts or 0)


def find_loop(agent: AgentConfig) -> AgentLoop:
    """Return the loop `single_turn`, `tool_agent`, `harness`, or an instance of the class `package.module:Class`.

    Raises ValueError if the path, the arguments or the class are wrong.
    """
    if agent.loop in (SINGLE_TURN, TOOL_AGENT):
        return SingleTurn() if agent.loop == SINGLE_TURN else ToolAgent()
    if agent.loop == HARNESS:
        # Imported by name, because it is in a higher layer.
        made: Any = importlib.import_module("megarl.environments.harness_loop").Harness.of(agent)
        return cast(AgentLoop, made)
    found: Any = imported(agent.loop, "agent.loop:")
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ValueError(f"agent.loop: {agent.loop!r} must be a class with a method `async def run(self, ctx)`")
    try:
        made = found(**resolved(agent.kwargs, "agent.kwargs"))
    except TypeError as error:
        raise ValueError(f"agent.loop: {agent.loop!r} cannot be made with agent.kwargs: {error}") from error
    except ValueError:  # the message already names the argument
        raise
    except Exception as error:
        raise ValueError(f"agent.loop: {agent.loop!r} failed with {type(error).__name__}: {error}") from error
    return cast(AgentLoop, made)
