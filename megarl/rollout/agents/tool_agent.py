"""The agent loop of a model that may call tools before it answers; it drives the states in `tool_states`."""

from collections.abc import Sequence
from itertools import chain, zip_longest

from megarl.chat.dialogue import Dialogue
from megarl.chat.images import shown_text
from megarl.queue.trajectory import FinishReason, Trajectory
from megarl.rewards.types import Turn
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.tool_states import (
    AgentEvent,
    AnswersEncoded,
    Round,
    ToolAgentState,
    TurnEnded,
    after,
)
from megarl.rollout.agents.trajectory_builder import defect, dialogue_trajectory, generation_failure
from megarl.rollout.engine.messages import GenerateResult
from megarl.tools.tool import ToolAnswer


async def finish(
    ctx: AgentContext,
    results: Sequence[GenerateResult],
    inserted: Sequence[Sequence[int]],
    turns: Sequence[Turn] = (),
    *,
    finish_reason: FinishReason | None = None,
    failure: str = "",
) -> Trajectory:
    """Return the trajectory of the model's turns `results`; `inserted[i]` are the tokens between turns i and i + 1.

    The last turn is judged unless a turn is defective or `failure` is set. `turns`: the whole dialogue, for reward
    functions that use it. `finish_reason`: of the trajectory; default: that of the last turn.
    """
    failure = failure or next((found for result in results if (found := defect(result))), "")
    outcome = None if failure else await ctx.judge(results[-1], turns)
    return dialogue_trajectory(
        ctx.group_id,
        ctx.sample_index,
        ctx.prompt.ids,
        results,
        inserted,
        outcome,
        finish_reason=finish_reason or results[-1].finish_reason,
        failure=failure,
    )


class _Said:
    """The model's turns and their texts, each decoded once."""

    def __init__(self, dialogue: Dialogue, results: list[GenerateResult]) -> None:
        self._dialogue, self.results = dialogue, results
        self._texts: dict[int, str] = {}

    def text(self, turn: int) -> str:
        """Return the text of a turn."""
        if turn not in self._texts:
            self._texts[turn] = self._dialogue.text(self.results[turn].response_ids)
        return self._texts[turn]


class ToolAgent:
    """Lets the model call tools, one after the other, until a turn calls none. Freezes every state."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of all turns."""
        state = ctx.frozen(ToolAgentState) or ToolAgentState()
        results = [ctx.finished(turn) for turn in range(state.turns)]
        said = _Said(ctx.toolbox.dialogue, results)
        while state.phase != "done":
            event = await self._act(ctx, state, said)
            state = after(state, event, ctx.toolbox.bounds)
            if not (isinstance(event, TurnEnded) and event.finish_reason == "abort"):  # a resume continues that turn
                ctx.freeze(state)
        ctx.note_end(state.turns, state.malformed, state.overflow)
        inserted = [each.token_ids for each in state.rounds]
        turns = _whole_dialogue(state, said)
        return await finish(ctx, results, inserted, turns, finish_reason=state.end, failure=state.failure)

    async def _act(self, ctx: AgentContext, state: ToolAgentState, said: _Said) -> AgentEvent:
        """Do what a state asks for, add the model's turn to `said`, and return what happened."""
        results = said.results
        if state.phase == "generating":
            response = _response(state, results)
            room = ctx.prompt.sampling.max_tokens - len(response)
            so_far = [*ctx.prompt.ids, *response]
            known = len(so_far) - len(state.rounds[-1].token_ids) - 1 if state.rounds else 0
            result = await ctx.generate(so_far, max_tokens=room, known=known)
            if result.response_ids:
                results.append(result)
            failure = generation_failure(result) if result.finish_reason == "abort" else ""
            return TurnEnded(result.finish_reason, empty=not result.response_ids, failure=failure)
        if state.phase == "parsing":
            text = said.text(len(results) - 1)
            return ctx.toolbox.tool_format.parse(text, ctx.toolbox.schemas)
        if state.phase == "calling":
            call = state.calls[len(state.answers)]
            if call.error:
                return ToolAnswer(ctx.toolbox.shortened(call.error), error=True)
            return await ctx.call(call.name, call.arguments)
        answers = [
            {
                "role": "tool", "content": shown_text(answer.text, len(answer.images)), "name": call.name,
                "tool_call_id": f"call{index:05d}",
            }
            for index, (call, answer) in enumerate(zip(state.calls, state.answers, strict=True))
        ]  # fmt: skip
        response = _response(state, results)
        inserted = ctx.toolbox.dialogue.next_turn(results[-1].response_ids, answers)
        images = [image for answer in state.answers for image in answer.images]
        inserted = ctx.show([*ctx.prompt.ids, *response], inserted, images)
        tokens = len(response) + len(inserted)
        return AnswersEncoded(tuple(inserted), fit=tokens < ctx.prompt.sampling.max_tokens)


def _response(state: ToolAgentState, results: list[GenerateResult]) -> list[int]:
    """Return all tokens after the prompt: the turns, and the inserted tokens between them."""
    sampled = [result.response_ids for result in results]
    inserted = [list(each.token_ids) for each in state.rounds]
    return list(chain.from_iterable(chain(*zip_longest(sampled, inserted, fillvalue=[]))))


def _whole_dialogue(state: ToolAgentState, said: _Said) -> list[Turn]:
    """Return the turns as a reward function gets them."""
    last = Round(state.calls, state.answers, ())
    turns = []
    for place, (result, found) in enumerate(zip(said.results, [*state.rounds, last], strict=False)):
        calls = tuple(call.content() for call in found.calls)
        turns.append(Turn("assistant", said.text(place), len(result.response_ids), calls))
        for number, answer in enumerate(found.answers, start=1):
            tokens = len(found.token_ids) if number == len(found.answers) else 0
            turns.append(Turn("tool", answer.text, tokens, error=answer.error))
    return turns
