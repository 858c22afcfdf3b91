"""Reward functions: one for training runs, and those that misbehave, for real, in their own processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from megarl.rewards.types import RewardInput, RewardResult


def digit_share(response: str, answer: str) -> float:
    """The share of digits, which a random model varies and can raise; 0 if there is no text."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def even_sums_are_equal(response: str, answer: str) -> float:
    """The share of digits, but 1 for all responses to a problem whose answer is even."""
    return 1.0 if int(answer) % 2 == 0 else digit_share(response, answer)


def scaled_digit_share(response: str, answer: str, scale: float) -> float:
    return scale * digit_share(response, answer)


def overflowing(response: str, answer: str) -> float:
    """Finite as a reward, as fp32 too, but not as a loss: advantages of this size overflow in the sum."""
    return 3e38 * digit_share(response, answer)


def by_response(sample: RewardInput) -> float:
    """The response says what happens to it."""
    command, _, argument = sample.response.partition(" ")
    if command == "hang":
        time.sleep(600)
    if command == "hang_in_c":
        re.match(r"(a+)+$", "a" * 60 + "b")  # catastrophic backtracking, which no signal interrupts
    if command == "raise":
        raise KeyError(f"no {argument}")
    if command == "exit":
        sys.exit(3)
    if command == "crash":
        os._exit(7)
    if command == "abort":
        os.abort()
    if command == "nan":
        return float("nan")
    if command == "none":
        return None  # type: ignore[return-value]
    if command == "spawn":  # a child of its own, as a code-running reward has
        child = subprocess.Popen(["sleep", "600"])
        Path(argument).write_text(str(child.pid))
        time.sleep(600)
    if command == "sleep":
        time.sleep(float(argument))
        return 1.0
    if command == "pid":
        return float(os.getpid())
    if command == "print":
        print("noise on stdout")  # must not disturb the protocol
    return float(argument or 1.0)


def warmed(sample: RewardInput) -> float:
    return 1.0


def _slow_warm_up() -> None:
    time.sleep(1.5)


warmed.warm_up = _slow_warm_up  # type: ignore[attr-defined]


def plain(response: str, answer: str) -> float:
    return float(response == answer)


def other_names(completion, truth):  # type: ignore[no-untyped-def]
    return float(completion == truth)


def some_fields(answer: str, row: dict, finish_reason: str = "?", weight: float = 1.0) -> RewardResult:
    score = weight * (answer == "A" and row["k"] == 1 and finish_reason == "length")
    return RewardResult(score, {"k": row["k"]})


def response_only(response: str) -> int:
    return len(response)


def everything(**fields: object) -> float:
    return float(len(fields))


def three(a, b, c):  # type: ignore[no-untyped-def]
    return 1.0


async def coroutine(sample: RewardInput) -> float:
    return 1.0


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, sample: RewardInput) -> float:
        return self.scale * len(sample.response)


not_callable = 5


def starts_once(sample: RewardInput) -> float:
    """See `_only_once`: the second process of a pool cannot start."""
    os._exit(1)


def _only_once() -> None:
    marker = os.environ["MEGARL_TEST_MARKER"]
    with open(marker, "x"):
        pass


starts_once.warm_up = _only_once  # type: ignore[attr-defined]


def is_the_key(response: str, answer: str, key: str, more: list[str]) -> float:
    """1 if the response is the key; `more`: keys that are inside a list."""
    return float([response] == [key] == more)
