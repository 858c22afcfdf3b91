"""Input and result of a reward function, and what a reward process is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ErrorReason = Literal["timeout", "exception", "crash", "invalid", "memory", "foreign"]
"""`foreign`: the process sent something else than an answer. `memory`: it needed more than `reward.memory_gib`."""

REASONING_TAGS = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Kimi K2, MiniMax, Nemotron, OLMo and most others
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel|>analysis", "<|channel|>final"),  # gpt-oss
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<thinking>", "</thinking>"),  # prompts in tutorials, like the next one
    ("<reasoning>", "</reasoning>"),
)
"""Marks around the reasoning of published models."""

OnError = Literal["drop"] | float
"""A sample whose function failed is dropped, or gets this reward."""


@dataclass(frozen=True)
class Turn:
    """One turn of an agent's trajectory.

    `role`: assistant, tool or user. `calls`: the model's calls, each {"name", "arguments"} or {"error"}. `tokens`: how
    many, including the end of an assistant's turn. `error`: the tool's answer is an error.
    """

    role: str
    text: str
    tokens: int = 0
    calls: tuple[dict[str, Any], ...] = ()
    error: bool = False


@dataclass(frozen=True)
class RewardInput:
    """One response to be scored. All of its fields must be picklable.

    Attributes:
        prompt: the last user message.
        response: the text of the response; for an agent, only of the model's last turn. It never includes answers of
            tools.
        token_ids: the token ids of the response.
        finish_reason: stop | length | abort.
        answer: the reference answer.
        row: all fields of the data row, unchanged.
        turns: an agent's whole trajectory after the prompt, in order; empty for a single response.
        prompt_end: the text of the rendered prompt's last tokens, where a template may have opened the reasoning.
    """

    prompt: str
    response: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    answer: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    prompt_end: str = ""

    @property
    def model_turns(self) -> int:
        """The number of turns of the model; 1 for a single response."""
        return sum(turn.role == "assistant" for turn in self.turns) if self.turns else 1


@dataclass(frozen=True)
class RewardResult:
    """A score and its named components. Training uses only the score; the components become metrics.

    `answer` is the final answer in a form in which equal answers are equal strings, for majority votes; None if there
    is none or the function does not return it. `turn_rewards`: what each of the model's turns has earned besides, in
    order; empty for none. Only an advantage by turn trains on them (`algorithm.advantage: mt_grpo`).

    The pool sets the other fields, whatever a function returns. `reason`: why the function gave no reward, None if it
    did; `error`: one line about that; `trace`: the end of the function's own traceback. `score` is then
    `reward.on_error`, and 0 with `drop`, where `dropped` is true: the sample must not be trained on. `redone`: how
    often the sample was scored again because its process had ended.
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()
    reason: ErrorReason | None = None
    error: str | None = None
    trace: str = ""
    dropped: bool = False
    redone: int = 0

    @classmethod
    def failed(cls, reason: ErrorReason, error: str, trace: str = "") -> RewardResult:
        """Return the result of a sample that has no reward."""
        return cls(0.0, reason=reason, error=error, trace=trace)


RewardFunction = Callable[[RewardInput], RewardResult]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function: `gsm8k`, `math`, `code` or `package.module:function`, and the arguments bound to it.

    `key`: its place in the config, for messages.
    """

    function: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: str = "reward"


@dataclass(frozen=True)
class Setup:
    """The first message to a reward process; `path`: the pool's sys.path, so that it finds the same modules.

    Later messages name a function by its index in `functions`. `memory_bytes`: how much the process may allocate.
    """

    functions: tuple[RewardSpec, ...]
    path: list[str]
    memory_bytes: int | None = None


def judged_part(sample: RewardInput, answer_after: str | None) -> str:
    """Return the part of a response in which to find the final answer.

    That is the text after the last mark that ends the model's reasoning: with "auto" any of `REASONING_TAGS`, else
    `answer_after`, whose start mark is the same without its slash. A response with unclosed reasoning, which the end of
    the prompt may have opened, has no answer: "". None and "none" take the whole response.
    """
    part = sample.response
    if answer_after is None or answer_after == "none":
        return part
    own = ((answer_after.replace("/", "", 1), answer_after),)
    for start, end in REASONING_TAGS if answer_after == "auto" else own:
        _, mark, part = part.rpartition(end)
        prompts = () if mark else (sample.prompt, sample.prompt_end)
        if start != end and (start in part or any(text.rstrip().endswith(start) for text in prompts)):
            return ""
    return part
