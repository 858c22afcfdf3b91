"""Input and result of a reward function, and what a reward process is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ErrorReason = Literal["timeout", "exception", "crash", "invalid", "memory", "foreign"]
"""`foreign`: the process sent what is no answer to the sample. `memory`: it needed more than `reward.memory_gib`."""

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
    ("<thinking>", "</thinking>"),  # prompts of tutorials, as the next one
    ("<reasoning>", "</reasoning>"),
)
"""Marks that start and end the reasoning of published models."""

OnError = Literal["drop"] | float
"""What a sample is worth whose function failed: nothing, because it is not used, or this reward."""


@dataclass(frozen=True)
class Turn:
    """One turn of an agent's trajectory.

    `role`: assistant, tool or user. `calls`: those that the model made in it, each {"name", "arguments"} or {"error"}.
    `tokens`: how many the turn has, the end of an assistant's turn included. `error`: a tool's answer is one.
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
        response: the text of the response; of an agent, that of the model's last turn alone. What a tool has answered
            is never part of it.
        token_ids: the token ids of the response.
        finish_reason: stop | length | abort.
        answer: the reference answer.
        row: all fields of the data row, unchanged.
        turns: the whole trajectory of an agent after the prompt, in order; empty for a single response.
        prompt_end: the last tokens of the rendered prompt as text, where a template may have opened the reasoning.
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
    """A score and its named components; training uses only the score, the components are reported as metrics.

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
    """The first message to a reward process; `path` is the pool's sys.path, so that the same modules are found.

    Later messages name a function by its number in `functions`. `memory_bytes`: the most that the process may allocate.
    """

    functions: tuple[RewardSpec, ...]
    path: list[str]
    memory_bytes: int | None = None


def judged_part(sample: RewardInput, answer_after: str | None) -> str:
    """Return the part of a response that a final answer is looked for in.

    That is the text after the last mark that ends the model's reasoning: with "auto" of each pair of `REASONING_TAGS`,
    else `answer_after`, whose start is the same mark without its slash. A response that opens a reasoning and does not
    close it has no answer: "". Nor has one whose prompt ends in an open reasoning, as many templates have it. None and
    "none" take all of the response.
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
