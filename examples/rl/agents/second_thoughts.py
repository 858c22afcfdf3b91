"""A custom loop: the model answers, reads what a tool says about the answer, and answers again."""

from __future__ import annotations

from dataclasses import dataclass

from megarl import AgentContext, Trajectory, Turn, finish


@dataclass
class Thoughts:
    """The loop's state: what it inserted after the first turn. It is empty until the tool answers."""

    said: str = ""
    token_ids: tuple[int, ...] = ()


class SecondThoughts:
    """Asks `tool` about the first answer, of at most `first_tokens` tokens."""

    def __init__(self, tool: str, first_tokens: int = 512) -> None:
        self.tool, self.first_tokens = tool, first_tokens

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of both answers; the reward is the second's."""
        dialogue, prompt = ctx.toolbox.dialogue, ctx.prompt.ids
        state = ctx.frozen(Thoughts)
        if state is None:
            first = await ctx.generate(prompt, max_tokens=self.first_tokens)
            answer = await ctx.call(self.tool, {"text": dialogue.text(first.response_ids)})
            message = {"role": "user", "content": f"{answer.text} Answer again."}
            state = Thoughts(answer.text, tuple(dialogue.next_turn(first.response_ids, [message])))
            ctx.freeze(state)  # a resumed run continues here
        first = ctx.finished(0)
        room = ctx.prompt.sampling.max_tokens - len(first.response_ids) - len(state.token_ids)
        if room < 1:
            return await finish(ctx, [first], [], finish_reason="length")
        begun = [*prompt, *first.response_ids]
        # The first turn has read all of it but the last token (`trainer.router_replay: r3`).
        second = await ctx.generate([*begun, *state.token_ids], max_tokens=room, known=len(begun) - 1)
        ctx.note_end(turns=2)
        turns = [
            Turn("assistant", dialogue.text(first.response_ids), len(first.response_ids)),
            Turn("user", state.said, len(state.token_ids)),
            Turn("assistant", dialogue.text(second.response_ids), len(second.response_ids)),
        ]
        return await finish(ctx, [first, second], [state.token_ids], turns)
