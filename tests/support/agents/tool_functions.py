"""Functions that the tests of tools name by their import path."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any, Literal


def add(first: int, second: int = 1) -> int:
    """Add two numbers."""
    return first + second


async def slowly(text: str) -> dict[str, str]:
    """Answer after a while."""
    await asyncio.sleep(0.01)
    return {"text": text}


def unit(value: float, to: Literal["m", "km"], tags: list[str]) -> list[Any]:
    """Convert."""
    return [value, to, *tags]


def with_secret(question: str, secret: str) -> str:
    """Use what is bound."""
    return f"{question} {secret}"


def misbehave(how: str) -> str:
    """Do what `how` says."""
    if how == "hang":
        time.sleep(1000)
    if how == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # left-by-a-tool"])
        time.sleep(1000)
        child.wait()
    if how == "exit":
        sys.exit(3)
    if how == "die":
        os._exit(4)
    if how == "memory":
        bytearray(2 << 30)
    if how == "fork" and os.fork() == 0:
        return "the child's"
    if how == "raise":
        raise ValueError("not today")
    if how == "long":
        return "x" * 100_000
    if how == "object":
        return object()  # type: ignore[return-value]
    return f"{how} by {os.getpid()}"


def untyped(first, second: int) -> int:  # type: ignore[no-untyped-def]
    """Add."""
    return first + second


def without_docstring(first: int) -> int:
    return first


def many(*numbers: int) -> int:
    """Add."""
    return sum(numbers)


def takes_object(thing: subprocess.Popen) -> int:  # type: ignore[type-arg]
    """Wait."""
    return thing.wait()


NOT_A_FUNCTION = 7
