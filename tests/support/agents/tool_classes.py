"""Tools as classes that the tests name by their import path."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from megarl.tools.tool import ToolAnswer


class Misbehaving:
    """Does what `how` says. It counts its calls, and notes them in a file."""

    name = "misbehaving"
    description = "Misbehave."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"how": {"type": "string"}}}

    def __init__(self, path: str, *, idempotent: bool = False, secret: str = "") -> None:
        self.path, self.idempotent, self.secret, self.count = Path(path), idempotent, secret, 0

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        how = arguments["how"]
        self.count += 1
        with self.path.open("a") as file:
            file.write(f"{how}\n")
        if how == "block":
            time.sleep(1000)
        if how == "wait":
            await asyncio.sleep(1000)
        if how == "thread":
            await asyncio.to_thread(subprocess.run, SLEEPER, check=False)
        if how == "child":
            with subprocess.Popen(SLEEPER):
                time.sleep(1000)
        if how == "slow":
            await asyncio.sleep(1.5)
            with self.path.open("a") as file:
                file.write("slow ended\n")
        if how == "deaf":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
        if how == "die":
            os._exit(4)
        if how == "segfault":
            os.kill(os.getpid(), 11)
        if how == "fork" and os.fork() == 0:
            return ToolAnswer("the child's")
        if how == "fork and wait" and os.fork() == 0:
            await asyncio.sleep(0.01)
            return ToolAnswer("the child's")
        if how == "exit":
            sys.exit(3)
        if how == "raise":
            raise ValueError("not today")
        if how == "text":
            return "no ToolAnswer"
        if how == "long":
            return ToolAnswer("x" * 3_000_000)
        if how == "error":
            return ToolAnswer("your mistake", error=True)
        return ToolAnswer(f"{how}|{self.count}|{os.getpid()}|{self.secret}")

    async def close(self) -> None:
        with self.path.open("a") as file:
            file.write("closed\n")


class FailsToClose(Misbehaving):
    async def close(self) -> None:
        raise OSError("gone")


class NeverCloses(Misbehaving):
    async def close(self) -> None:
        await asyncio.sleep(1000)


SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)  # left-by-a-class"]


class DiesAtStart(Misbehaving):
    def __init__(self) -> None:
        os._exit(7)


class HangsAtStart(Misbehaving):
    def __init__(self) -> None:
        time.sleep(1000)
