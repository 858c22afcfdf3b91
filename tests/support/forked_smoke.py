"""Runs benchmarks/gpu_smoke.py on the CPU with most of its steps forked from one process that has imported everything.

    python -m tests.support.forked_smoke ARGUMENTS

Each step keeps a process of its own with a deadline, but importing torch, transformers and Megatron-Core for each of
them would take more time than the steps. `STARTED` steps start a new interpreter, as all do without this.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.checkout import ROOT

STARTED = ("streams",)  # it needs torch as it is, without the CPU platform
_run = subprocess.run


def run(command: list[str], *, timeout: float, env: dict[str, str], **options: Any) -> Any:
    """Run a step as `subprocess.run` would."""
    if command[command.index("--in-process") + 1] in STARTED:
        return _run(command, timeout=timeout, env=env, **options)
    log = Path(command[command.index("--json") + 1]).with_suffix(".log")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _step(command[2:], log, env)
    deadline = time.monotonic() + timeout
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise subprocess.TimeoutExpired(command, timeout, stderr=log.read_bytes())
        time.sleep(0.02)
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(ended[1]), "", log.read_text())


def _step(arguments: list[str], log: Path, env: dict[str, str]) -> None:
    """Run one step in this forked process, and end it."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(env)
        importlib.import_module("gpu_smoke").main(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # a step that succeeds ends its process itself


def main() -> int:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    smoke = importlib.import_module("gpu_smoke")
    from megarl import platforms

    platforms.activate()
    for module in ("trainer.policy", "models.export", "checkpoint.save.checkpointer", "run.performance"):
        importlib.import_module(f"megarl.{module}")
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

    assert Qwen3ForCausalLM and Qwen3MoeForCausalLM  # importing a name loads its module
    with patch.object(smoke.subprocess, "run", run):
        return int(smoke.main())


if __name__ == "__main__":
    raise SystemExit(main())
