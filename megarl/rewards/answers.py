"""The answers of a reward process, as JSON that the pool checks: it decodes nothing that could run code. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from megarl.rewards.types import ErrorReason, RewardResult

MAX_ANSWER_BYTES = 1 << 16  # of an encoded answer; a real one has a few hundred


class AnswerError(ValueError):
    """A message of a reward process is not the answer that the pool waits for."""


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


@dataclass(frozen=True)
class StartReport:
    """The first message of a reward process; `problem` is empty if it is ready, else why it cannot start."""

    problem: str = ""


_ANSWER = TypeAdapter(RewardAnswer)
_START = TypeAdapter(StartReport)


def encode_answer(answer: RewardAnswer) -> bytes:
    """Return the bytes of an answer; one that would be too long becomes an answer that says so."""
    encoded = _encode(answer)
    if len(encoded) <= MAX_ANSWER_BYTES:
        return encoded
    message = f"the result has {len(encoded)} bytes as JSON, and at most {MAX_ANSWER_BYTES} are allowed: return less"
    return _encode(RewardAnswer(answer.task, None, "invalid", message))


def decode_answer(encoded: bytes, task: int) -> RewardAnswer:
    """Return the answer for the sample `task`. Raises AnswerError for anything else."""
    try:
        answer = _ANSWER.validate_json(encoded, strict=True)
    except ValidationError as error:
        raise AnswerError(f"a message that is no answer: {encoded[:60]!r}") from error
    if answer.task != task:
        raise AnswerError(f"an answer for sample {answer.task} where that for sample {task} was due")
    if (answer.result is None) == (answer.reason is None):
        raise AnswerError("an answer with both a result and an error, or with neither")
    if answer.result is not None:
        for score in (answer.result.score, *answer.result.turn_rewards):
            if not math.isfinite(score):
                raise AnswerError(f"an answer with the score {score}, which is no finite number")
    return answer


def encode_start(report: StartReport) -> bytes:
    """Return the bytes of a start report."""
    return _encode(report)


def decode_start(encoded: bytes) -> StartReport:
    """Return a start report. Raises AnswerError for anything else."""
    try:
        return _START.validate_json(encoded, strict=True)
    except ValidationError as error:
        raise AnswerError(f"a message that is no start report: {encoded[:60]!r}") from error


def _encode(message: RewardAnswer | StartReport) -> bytes:
    return _clean(json.dumps(asdict(message)))


def _clean(text: str) -> bytes:
    r"""Return the bytes of JSON text, with lone surrogates, which are no Unicode text, replaced."""
    if "\\ud" not in text:
        return text.encode()
    return json.dumps(_replace(json.loads(text))).encode()


def _replace(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_replace(key): _replace(each) for key, each in value.items()}
    return value
