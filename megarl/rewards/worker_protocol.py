"""The answers of a reward process, as JSON that the pool checks: it decodes nothing that could run code. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from megarl.common.process.child_process import AnswerError, checked_answer
from megarl.common.process.child_program import json_bytes
from megarl.rewards.types import ErrorReason, RewardResult

MAX_ANSWER_BYTES = 1 << 16  # of an encoded answer; a real one has a few hundred


@dataclass(frozen=True)
class RewardAnswer:
    """The answer for the sample with the number `task`: a result, or why there is none.

    `message` is one line for people; `trace` is the end of the function's own traceback.
    """

    task: int
    result: RewardResult | None
    reason: ErrorReason | None = None
    message: str = ""
    trace: str = ""


_ANSWER = TypeAdapter(RewardAnswer)


def encode_answer(answer: RewardAnswer) -> bytes:
    """Return the bytes of an answer; one that would be too long becomes an answer that says so."""
    encoded = json_bytes(asdict(answer))
    if len(encoded) <= MAX_ANSWER_BYTES:
        return encoded
    message = f"the result has {len(encoded)} bytes as JSON, and at most {MAX_ANSWER_BYTES} are allowed: return less"
    return json_bytes(asdict(RewardAnswer(answer.task, None, "invalid", message)))


def decode_answer(encoded: bytes, task: int) -> RewardAnswer:
    """Return the answer for the sample `task`. Raises AnswerError for anything else."""
    answer = checked_answer(encoded, _ANSWER)
    if answer.task != task:
        raise AnswerError(f"an answer for sample {answer.task} where that for sample {task} was due")
    if (answer.result is None) == (answer.reason is None):
        raise AnswerError("an answer with both a result and an error, or with neither")
    if answer.result is not None:
        for score in (answer.result.score, *answer.result.turn_rewards):
            if not math.isfinite(score):
                raise AnswerError(f"an answer with the score {score}, which is no finite number")
    return answer
