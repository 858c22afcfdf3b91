"""Reward functions: one for training runs, and those that misbehave, for real, in their own processes."""

import ctypes
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

from megarl.rewards.builtin import math as math_module
from megarl.rewards.types import RewardInput, RewardResult


def digit_share(response: str, answer: str) -> float:
    """The share of digits, which a random model varies and can raise; 0 if there is no text."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def mean_byte(response: str, answer: str) -> float:
    """The mean of the text's bytes over 256: other for almost every response, also of a model whose tokens are bytes.

    Of these one in 26 is a digit, so in one of seven groups of four short responses none has any.
    """
    content = response.encode()
    return sum(content) / max(1, 256 * len(content))


def even_sums_are_equal(response: str, answer: str) -> float:
    """The share of digits, but 1 for all responses to a problem whose answer is even."""
    return 1.0 if int(answer) % 2 == 0 else digit_share(response, answer)


def scaled_digit_share(response: str, answer: str, scale: float) -> float:
    return scale * digit_share(response, answer)


def overflowing_at(response: str, answer: str, mark: str) -> float:
    """The share of digits; of one sample far more, for each time that the file `mark` is made.

    It is finite as a reward, as fp32 too, but not as a loss: advantages of this size overflow in the sum.
    """
    try:
        os.unlink(mark)
    except FileNotFoundError:
        return digit_share(response, answer)
    return 3e38


def slow_and_marked(response: str, answer: str, mark: str, seconds: float = 0.3, slow: str = "") -> float:
    """The share of digits after some seconds; the file `mark` tells that somebody has asked.

    `slow`: a file without which it takes no time.
    """
    Path(mark).touch()
    if not slow or Path(slow).exists():
        time.sleep(seconds)
    return digit_share(response, answer)


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


_kept: list[bytearray] = []


def hostile(sample: RewardInput) -> float | RewardResult:
    """Do what a worker must survive, by accident or on purpose; the number after the command is the reward."""
    command, _, argument = sample.response.partition(" ")
    number, _, path = argument.partition(" ")
    reward = float(number or 1.0)
    channel = int(sys.argv[1])  # the worker's socket
    if command in ("fork", "fork_exit", "fork_raise", "fork_c"):
        pid = ctypes.CDLL(None).fork() if command == "fork_c" else os.fork()
        if pid == 0:
            reward = 1000.0 + reward
            if command == "fork_exit":
                sys.exit(0)
            if command == "fork_raise":
                raise KeyboardInterrupt
    if command == "interrupt":
        raise KeyboardInterrupt
    if command == "flood":
        os.write(channel, b"x" * 3_000_000)
    if command == "garbage":
        os.write(channel, struct.pack("!I", 5) + b"hello")
    if command == "forge":
        os.write(channel, _frame([1_000_000, {"score": 99.0}]))
    if command == "forge_nan":
        due = next(frame.f_locals["task"] for frame, _ in traceback.walk_stack(None) if "task" in frame.f_locals)
        os.write(channel, _frame([due, {"score": float("nan")}]))
    if command == "half":
        os.write(channel, struct.pack("!I", 500) + b"{")
        time.sleep(600)
    if command == "long":
        return RewardResult(reward, answer="x" * 3_000_000)
    if command == "odd":
        return RewardResult(reward, {"caf\u00e9": float("inf")}, "\ud800")
    if command == "allocate":
        bytearray(8 << 30)
    if command == "leak":
        _kept.append(bytearray(400 << 20))
    if command in ("child_crash", "child_apart"):
        child = subprocess.Popen(["sleep", "600"], start_new_session=command == "child_apart")
        Path(path).write_text(str(child.pid))
        if command == "child_crash":
            os._exit(7)
        time.sleep(600)
    if command == "crash_once" and not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return reward


def _frame(content: object) -> bytes:
    encoded = json.dumps(content).encode()
    return struct.pack("!I", len(encoded)) + encoded


def broken(sample: RewardInput) -> float:
    raise LookupError("the judge has no key \x1b[31m")


def slashed(sample: RewardInput) -> RewardResult:
    return RewardResult(1.0, {"format/ok": 1.0})


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


def as_in_trl(completions: list[str], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


def as_in_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return 0.0


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


def slow_digit_share(response: str, answer: str) -> float:
    """The share of digits after a while, so that most of a run's time is spent here."""
    time.sleep(0.1)
    return digit_share(response, answer)


def endless(sample: RewardInput) -> float:
    time.sleep(600)
    return 1.0


def fails_on_even(response: str, answer: str) -> float:
    """The share of digits; raises for responses of an even length."""
    if len(response) % 2 == 0:
        raise LookupError("no verdict on an even length")
    return digit_share(response, answer)


def is_the_key(response: str, answer: str, key: str, more: list[str]) -> float:
    """1 if the response is the key; `more`: keys that are inside a list."""
    return float([response] == [key] == more)


def half_by_turn(sample: RewardInput) -> RewardResult:
    """0.5 for each of `count` turns."""
    return RewardResult(1.0, turn_rewards=(0.5,) * sample.row["count"])


def knows_a_password(response: str, answer: str, password: str, digest: str) -> float:
    """digit_share, for whoever gives the password of that digest."""
    if hashlib.sha256(password.encode()).hexdigest() != digest:
        raise PermissionError("not the password")
    return digit_share(response, answer)


def math_of_any_size(sample: RewardInput) -> float:
    """The shipped reward without its look at the size of answers."""
    with mock.patch.object(math_module, "is_too_large", lambda text: False):
        return math_module.math(sample).score


math_of_any_size.warm_up = math_module.math.warm_up  # type: ignore[attr-defined]
