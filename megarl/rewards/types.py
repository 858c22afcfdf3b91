"""Input and result of a reward function, the outcome that the pool reports, and what a reward process is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ErrorReason = Literal["timeout", "exception", "crash", "invalid", "memory", "foreign"]
"""`foreign`: the process sent what is no answer to the sample. `memory`: it needed more than `reward.memory_gib`."""

OnError = Literal["drop"] | float
"""What a sample is worth whose function failed: nothing, because it is not used, or this reward."""


@dataclass(frozen=True)
class RewardInput:
    """One response to be scored. All of its fields must be picklable.

    Attributes:
        prompt: the last user message.
        token_ids: the token ids of the response.
        finish_reason: stop | length | abort.
        answer: the reference answer.
        row: all fields of the data row, unchanged.
    """

    prompt: str
    response: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    answer: str = ""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """A score and its named components; training uses only the score, the components are reported as metrics.

    `answer` is the final answer in a form in which equal answers are equal strings, for majority votes; None if there
    is none or the function does not return it.
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True)
class RewardOutcome:
    """The reward of one sample; `error` is None, or tells why there is none.

    `score` is then `reward.on_error`, and 0 with `drop`, where `dropped` is true: the sample must not be trained on.
    `redone`: how often it was scored again because its process had ended.
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    reason: ErrorReason | None = None
    answer: str | None = None
    dropped: bool = False
    redone: int = 0


RewardFunction = Callable[[RewardInput], RewardResult]


@dataclass(frozen=True)
class RewardSpec:
    """A reward function: `gsm8k`, `math` or `package.module:function`, and the arguments bound to it.

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
