"""Orders from the soak to code of its own inside the run: to its reward function, its loss and its agent loop.

An order is a file with the order's name in a directory alongside the run. The process that removes the file takes the
order, so that one process obeys it, once, and notes that in the file TAKEN before it does so. SLOWER is for all
processes, until it is withdrawn.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megarl.rewards.builtin.math import math
from megarl.rewards.types import RewardInput, RewardResult

TAKEN = "taken.jsonl"
SLOWER = "slower"
LATE = "late"  # no order: what is noted of a sample that was late


def give(orders: Path, name: str) -> None:
    """Give an order."""
    orders.mkdir(exist_ok=True)
    (orders / name).touch()


def withdraw(orders: Path, name: str) -> bool:
    """Take an order back; False if a process has taken it."""
    try:
        (orders / name).unlink()
    except FileNotFoundError:
        return False
    return True


def take(orders: Path, name: str) -> bool:
    """Take an order if there is one, and note that this process obeys it."""
    if not withdraw(orders, name):
        return False
    _append(orders / TAKEN, {"order": name, "pid": os.getpid(), "time": time.time()})
    return True


def _append(path: Path, content: dict[str, Any]) -> None:
    """Append one line in a single write: several processes write to the file, and each may be killed."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(content) + "\n").encode())
    finally:
        os.close(descriptor)


def _appended(path: Path) -> list[dict[str, Any]]:
    """Return what `_append` has written; a line that is being written is left out."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.is_file() else []


def taken(orders: Path, name: str) -> list[dict[str, Any]]:
    """Return what the processes have noted that have taken the orders of a name, oldest first: their `pid`."""
    return [each for each in _appended(orders / TAKEN) if each["order"] == name]


FORGED = 1000.0  # the reward that a forked child gives
FLOOD_BYTES = 3_000_000


def late_math(sample: RewardInput, share: float, seed: int, sleep_s: float, orders: str) -> RewardResult:
    """Return `math` of the sample; a `share` of the different answers sleeps for `sleep_s` seconds first, once.

    Each of them is noted in the file TAKEN of `orders`, the directory of the orders to fork and to flood.
    """
    if take(Path(orders), "fork-reward") and os.fork() == 0:
        return RewardResult(FORGED)
    if take(Path(orders), "flood-reward"):
        os.write(int(sys.argv[1]), b"x" * FLOOD_BYTES)  # the socket of the worker, which is its first argument
    if is_late(sample.prompt, sample.response, share, seed) and not was_late(Path(orders), sample):
        late = {"order": LATE, "pid": os.getpid(), "prompt": sample.prompt, "response": sample.response}
        _append(Path(orders) / TAKEN, late)
        time.sleep(sleep_s)
    return math(sample)


late_math.warm_up = math.warm_up  # type: ignore[attr-defined]


def is_late(prompt: str, response: str, share: float, seed: int) -> bool:
    """Return whether an answer is among the `share` that is late."""
    digest = hashlib.blake2b(f"{seed}\n{prompt}\n{response}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def was_late(orders: Path, sample: RewardInput) -> bool:
    """Return whether the same answer was late before."""
    return (sample.prompt, sample.response) in {(each["prompt"], each["response"]) for each in taken(orders, LATE)}
