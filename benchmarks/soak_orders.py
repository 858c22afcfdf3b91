"""Orders from the soak to code of its own inside the run: to its reward function, its loss and its agent loop.

An order is a file with the order's name in a directory beside the run. The process that removes the file takes the
order, so that one process obeys it, once, and notes that in the file TAKEN before it does so. SLOWER is for all
processes, until it is withdrawn, and so is WATCH_EVALUATION, which EVALUATED answers. HOLD holds up one step.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

TAKEN = "taken.jsonl"
SLOWER = "slower"
HOLD = "hold"
WATCH_EVALUATION = "watch-evaluation"
EVALUATED = "evaluated"  # a response of an evaluation was scored while that order was there


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
    line = json.dumps({"order": name, "pid": os.getpid(), "time": time.time()}) + "\n"
    descriptor = os.open(orders / TAKEN, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    return True


def taken(orders: Path, name: str) -> list[int]:
    """Return the pids of the processes that have taken the orders of a name, oldest first."""
    path = orders / TAKEN
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [each["pid"] for each in map(json.loads, lines) if each["order"] == name]
