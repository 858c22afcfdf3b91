"""What a reward function is given, what it returns, and what the pool makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ErrorReason = Literal["timeout", "exception", "crash", "invalid"]
ERROR_REASONS: tuple[ErrorReason, ...] = ("timeout", "exception", "crash", "invalid")


@dataclass(frozen=True)
class RewardInput:
    """One response to be judged. Everything in it must be picklable.

    `prompt`: the last user message; `answer`: the reference; `row`: all fields of the data row, as they stand
    in the file; `finish_reason`: stop | length | abort.
    """

    prompt: str
    response: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    answer: str = ""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """A score and named parts of it; the parts are reported, only the score is trained on.

    `answer`: the final answer that was judged, equal answers as equal strings, for majority votes. None: there is
    none, or the function does not say.
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True)
class RewardOutcome:
    """`error` is None, or says what cost the sample its reward (`score` is then `reward.on_error`)."""

    score: float
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    reason: ErrorReason | None = None
    answer: str | None = None


RewardFunction = Callable[[RewardInput], RewardResult]

# What a reward process sends for one sample: (result, None, "") or (None, reason, message).
Answer = tuple[RewardResult | None, ErrorReason | None, str]


@dataclass(frozen=True)
class Setup:
    """A reward process's first message. `path`: the pool's sys.path, so that the same modules are found."""

    function: str
    kwargs: dict[str, Any]
    path: list[str]
