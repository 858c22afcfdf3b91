"""The tutorials as their README tells them: its commands, and directories in which they run as in a checkout."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers import AutoTokenizer

from examples.quickstart.products_task import TOOLS_TEMPLATE
from tests.support.checkout import ROOT, environment
from tests.support.models.tiny import make_tiny_model
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run
from tests.support.waiting import wait_until

TUTORIALS = ROOT / "examples/tutorials"
PREPARATION = "preparation"
_SECTION = re.compile(r"^## \[(\w+)\]\(\1\)", re.MULTILINE)
_URL = "url  "  # begins the line that `megarl serve` prints when it can be asked
_BLOCK = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_commands(readme: str) -> dict[str, list[str]]:
    """The commands of each section, by the folder that its heading names; those before the first are PREPARATION."""
    before, *rest = _SECTION.split(readme)
    sections = {PREPARATION: before} | dict(zip(rest[::2], rest[1::2], strict=True))
    return {
        name: [line for block in _BLOCK.findall(text) for line in block.splitlines() if line.strip()]
        for name, text in sections.items()
    }


COMMANDS = read_commands((TUTORIALS / "README.md").read_text())


class Checkout:
    """A directory like a checkout with an active virtual environment; what runs in it writes below its `runs`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._bin = directory / "bin"
        self._bin.mkdir(parents=True)
        (directory / "examples").symlink_to(ROOT / "examples")
        programs = {"python": "", "python3": "", "megarl": " -m megarl", "torchrun": " -m megarl.cluster.torchrun.run"}
        for name, starts in programs.items():
            (self._bin / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{starts} "$@"\n')
            (self._bin / name).chmod(0o755)

    def call(self, command: str, *more: str, timeout_s: float = 600.0) -> str:
        """The output of a command of the README with further arguments; AssertionError if it fails or does not end."""
        process = self._start(command, *more)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=120)
            raise AssertionError(f"{command}: no end within {timeout_s:.0f} s:\n{output[-4000:]}") from None
        assert process.returncode == 0, output[-4000:]
        return output

    def train(self, command: str, *overrides: str, run_dir: str) -> Run:
        """A run that a command of the README starts, which writes to `run_dir`."""
        output = self.call(command, *overrides)
        assert_nothing_left(self.directory)  # it is in the PATH of whatever was started
        return Run(0, output, self.directory / run_dir)

    @contextmanager
    def serving(self, command: str, timeout_s: float = 600.0) -> Iterator[str]:
        """A server that a command of the README starts: what it has printed when it can be asked. Ctrl-C ends it."""
        said = self.directory / "server.txt"
        with said.open("w") as file:
            process = self._start(command, stdout=file)
        try:
            wait_until(lambda: _URL in said.read_text() or process.poll() is not None, timeout_s, command)
            assert _URL in said.read_text(), said.read_text()[-4000:]
            yield said.read_text()
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0, said.read_text()[-4000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
        assert_nothing_left(self.directory)

    def _start(self, command: str, *more: str, stdout: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        # `exec`: signals reach the program itself.
        return subprocess.Popen(
            ["bash", "-c", f"exec {command} {shlex.join(more)}"], cwd=self.directory, text=True,
            env=environment(PATH=f"{self._bin}{os.pathsep}{os.environ['PATH']}"),
            stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def with_random_models(checkout: Checkout) -> Checkout:
    """Random models and a few problems, in the places where the README's commands put models and data."""
    for name, sign, template in (("additions", "+", None), ("products", "*", TOOLS_TEMPLATE)):
        assets = checkout.directory / "runs/tutorials" / name
        make_tiny_model(assets / "model")
        if template is not None:
            tokenizer = AutoTokenizer.from_pretrained(assets / "model")
            tokenizer.chat_template = template
            tokenizer.save_pretrained(assets / "model")
        pairs = [(a, b) for a in range(3, 11) for b in range(2, 9)]
        rows = [
            {"problem": f"What is {a} {sign} {b}?", "answer": str(a + b if sign == "+" else a * b)} for a, b in pairs
        ]
        (assets / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return checkout
