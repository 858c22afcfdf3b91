"""The reward function of the soak: `math`, which now and then does not answer in time.

The share of late answers is drawn by a hash of seed, problem and response, so that it depends on nothing but what the
model has answered. An answer is late once: a group of equal answers would wait for each of them in turn. Each late
sample leaves a line in a file before it sleeps. The soak compares their number with the time-outs that the run has
counted.

After an order (soak_orders.py) it forks, and the child returns a reward that no answer has; or it floods the channel by
which its process answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from megarl.rewards.math import math
from megarl.rewards.types import RewardInput, RewardResult

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_orders import EVALUATED, WATCH_EVALUATION, give, take  # noqa: E402

FORGED = 1000.0  # the reward that a forked child gives
FLOOD_BYTES = 3_000_000
WATCHED_S = 0.1  # that a response takes in an evaluation which is watched, so that it can be caught


def late_math(sample: RewardInput, share: float, seed: int, sleep_s: float, marks: str, orders: str) -> RewardResult:
    """Return `math` of the sample; a `share` of the different answers sleeps for `sleep_s` seconds first, once.

    `marks`: the file to which each of them appends a line. `orders`: the directory of the orders to fork and to flood.
    """
    if take(Path(orders), "fork-reward") and os.fork() == 0:
        return RewardResult(FORGED)
    if take(Path(orders), "flood-reward"):
        os.write(int(sys.argv[1]), b"x" * FLOOD_BYTES)  # the socket of the worker, which is its first argument
    if is_late(sample.prompt, sample.response, share, seed) and not was_late(Path(marks), sample):
        mark(Path(marks), sample)
        time.sleep(sleep_s)
    return math(sample)


late_math.warm_up = math.warm_up  # type: ignore[attr-defined]


def watched_math(sample: RewardInput, orders: str) -> RewardResult:
    """Return `math` of the sample, for evaluations; tell that one is under way if the order to watch it is there."""
    if (Path(orders) / WATCH_EVALUATION).exists():
        give(Path(orders), EVALUATED)
        time.sleep(WATCHED_S)
    return math(sample)


watched_math.warm_up = math.warm_up  # type: ignore[attr-defined]


def is_late(prompt: str, response: str, share: float, seed: int) -> bool:
    """Tell whether an answer is among the `share` that is late."""
    digest = hashlib.blake2b(f"{seed}\n{prompt}\n{response}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def was_late(path: Path, sample: RewardInput) -> bool:
    """Tell whether the same answer was late before."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return any(
        (each["prompt"], each["response"]) == (sample.prompt, sample.response) for each in map(json.loads, lines)
    )


def mark(path: Path, sample: RewardInput) -> None:
    """Append one line in a single write: several processes write to the file, and each may be killed."""
    found = {"time": time.time(), "pid": os.getpid(), "prompt": sample.prompt, "response": sample.response}
    line = json.dumps(found) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def marked(path: Path) -> int:
    """Return the number of samples that were late."""
    return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0
