"""A model that calls tools, without an engine: what it samples follows from its prompt alone, so it repeats itself."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.chat.dialogue import Dialogue
from megarl.chat.formats import Prompt
from megarl.config.schema import Config
from megarl.config.schema.agent import AgentConfig
from megarl.queue.trajectory import VersionSpan
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.engine.continuation import RequestContext, ResponseCollector
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.tasks.prompts import PromptTask
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.tools.tool import ToolAnswer
from tests.support.models.chat_templates import chat_tokenizer
from tests.support.rollout.group_runner import GroupRunner

VERSION = 3
TOKENIZER = chat_tokenizer("qwen3")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def ids_of(text: str, end: bool = True) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], *[END] * end]


@dataclass
class Counter:
    """A tool that counts its calls; `slow` lets other tasks run before it answers."""

    name: str = "add"
    idempotent: bool = True
    description: str = "Adds."
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    calls: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[Mapping[str, Any]], str] = lambda arguments: str(arguments["a"] + arguments["b"])
    hold: Callable[[], Any] | None = None

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        self.calls.append(dict(arguments))
        await asyncio.sleep(0)
        if self.hold is not None:
            await self.hold()
        return ToolAnswer(self.answer(arguments))

    async def close(self) -> None: ...


@dataclass
class ScriptedBatcher:
    """Samples turn i of every sample as `turns[i]`, token by token, with a wait after each that others may use."""

    turns: list[str]
    piece: int = 6
    asked: list[tuple[GenerateRequest, Any, int | None]] = field(default_factory=list)
    pause: Callable[[], Any] | None = None

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        self.asked.append((request, context.prefix, context.near))
        so_far = ResponseCollector([request], context.tokens)
        name, turn = request.request_id, int(request.request_id.rsplit("-", 1)[1])
        ids = self.ids(turn)
        while so_far.unfinished:
            [sent] = so_far.send(1)
            done = len(sent.prompt_ids) - len(request.prompt_ids)
            piece = ids[done : min(done + self.piece, request.sampling.max_tokens)]
            ended = (
                "stop" if piece[-1] == END else "length" if done + len(piece) >= request.sampling.max_tokens else None
            )
            spans = (VersionSpan(VERSION, 0, len(piece)),)
            # Of a kind that float32 holds, as the journal does.
            so_far.add({name: ResponsePart(piece, [-(token % 8) / 4 for token in piece], spans, ended)})
            await (asyncio.sleep(0) if self.pause is None else self.pause())
        return so_far.results()[0]

    def ids(self, turn: int) -> list[int]:
        """The tokens of a turn, with the one that ends it."""
        return ids_of(self.turns[turn])


@dataclass
class KeepingRewards:
    """Keeps what it judges; the reward is 1 if the response holds `right`."""

    right: str = "4"
    judged: list[RewardInput] = field(default_factory=list)

    async def score(self, judged: RewardInput, function: int = 0) -> RewardResult:
        self.judged.append(judged)
        return RewardResult(float(self.right in judged.response))


class OneProblem:
    """The source of one problem."""

    def __init__(self, toolbox: Toolbox, max_tokens: int) -> None:
        prompt = Prompt(0, [{"role": "user", "content": "What is 1 + 1 + 2?"}], "4", {})
        ids = toolbox.dialogue.start(prompt.messages, toolbox.schemas)
        self.drawn = PromptTask(prompt, ids, SamplingSpec(max_tokens, 1.0, (END,)))

    def draw(self, group_id: int) -> Any:
        return self.drawn

    def dataset(self, group_id: int) -> str:
        return ""

    def reference(self, group_id: int) -> str:
        return "4"

    def decode_all(self, sequences: Any) -> list[str]:
        return [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in sequences]


def toolbox_of(*tools: Any, **bounds: Any) -> Toolbox:

    return Toolbox(
        Dialogue(TOKENIZER, [END]), AgentConfig(loop="tool_agent", **bounds), {each.name: each for each in tools}
    )


def agent_runner(
    config: Config, loop: AgentLoop, toolbox: Toolbox, batcher: Any, rewards: Any, max_tokens: int = 512
) -> GroupRunner:
    source: Any = OneProblem(toolbox, max_tokens)
    return GroupRunner(config, loop, source, batcher.generate, rewards, toolboxes={"": toolbox})
