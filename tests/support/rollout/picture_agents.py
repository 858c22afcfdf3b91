"""Tools that answer with pictures, and a loop that looks at one: it answers, calls the tool, and answers again."""

import base64
from collections.abc import Mapping
from typing import Any, ClassVar

from megarl import AgentContext, ToolAnswer, Trajectory, finish
from megarl.chat.images import shown_text
from tests.support.models.tiny_vision import picture

PARTS = [{"type": "text", "text": "Before "}, {"type": "image"}, {"type": "text", "text": " and after."}]


def data_url(content: bytes) -> str:
    """The URL by which chats have an image."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def draw(seed: int, how: str = "bytes") -> list[dict[str, Any]]:
    """Draw a picture, and say something before and after it."""
    content = b"<svg/>" if how == "svg" else picture(90, 60, seed)
    part = {"type": "image", "image": content}
    if how == "url":
        part = {"type": "image_url", "image_url": {"url": data_url(content)}}
    return [PARTS[0], part, PARTS[2]]


class Draw:
    """As the function, from a class."""

    name, description, idempotent = "draw", "Draw a picture.", True
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"seed": {"type": "integer"}}}

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Return two pictures, one of them of the seed."""
        seed = int(arguments["seed"])
        return ToolAnswer("Here: <image> or <image>", images=(picture(90, 60, seed), picture(60, 90, 1)))

    async def close(self) -> None:
        """Do nothing."""


class Looks:
    """Draws a picture of its own in every sample."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of both answers."""
        prompt, dialogue = ctx.prompt.ids, ctx.toolbox.dialogue
        first = await ctx.generate(prompt, max_tokens=8)
        answer = await ctx.call("draw", {"seed": 100 * ctx.group_id + ctx.sample_index})
        message = {"role": "tool", "content": shown_text(answer.text, len(answer.images)), "name": "draw"}
        before = [*prompt, *first.response_ids]
        inserted = ctx.show(before, dialogue.next_turn(first.response_ids, [message]), answer.images)
        ctx.freeze(first.response_ids)
        second = await ctx.generate([*before, *inserted], max_tokens=16)
        ctx.note_end(turns=2)
        return await finish(ctx, [first, second], [inserted])
