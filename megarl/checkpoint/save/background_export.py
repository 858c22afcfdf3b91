"""Exports a saved step to Hugging Face files, in a child process of low priority.

The process holds a lease on the checkpoint. A failed export is reported, but does not end the run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.common.process.processes import ProcessId

logger = logging.getLogger(__name__)

NICENESS = 19


class BackgroundExport:
    """Runs one export at a time, on rank 0. A step that is due during another export is skipped and reported."""

    def __init__(self, run_dir: Path, directory: CheckpointDirectory, notify: Callable[[str], None]) -> None:
        """`notify`: takes one line for the user."""
        self._run_dir, self._directory, self._notify = run_dir, directory, notify
        self._process: subprocess.Popen[bytes] | None = None
        self._step = -1

    def start(self, step: int) -> None:
        """Start to convert the checkpoint of `step` to RUN_DIR/hf_{step}, in the background."""
        if self._running():
            self._notify(f"no Hugging Face export of step {step}: that of step {self._step} is still running")
            return
        out = self._run_dir / f"hf_{step}"
        log_file = self._run_dir / "logs" / "hf-export.log"
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    ["nice", "-n", str(NICENESS), *convert_command(self._directory.path(step), out)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(),
                )  # fmt: skip
            self._step = step
            self._directory.lease(step, ProcessId.of(self._process.pid))
        except OSError as error:
            if self._process is not None:  # it has no lease, so retention may delete the checkpoint it reads
                self._process.kill()
                self._process.wait(timeout=10)
                self._process = None
            self._notify(f"the Hugging Face export of step {step} could not be started: {error}")

    def wait(self, timeout_s: float) -> None:
        """Wait until the running export has ended. After `timeout_s` seconds kill it and report that."""
        deadline = time.monotonic() + timeout_s
        while self._running():
            if time.monotonic() > deadline and self._process is not None:
                self._process.kill()
                self._process.wait(timeout=10)
                self._process = None
                self._notify(
                    f"the Hugging Face export of step {self._step} did not end within {timeout_s:.0f} s and was "
                    f"killed; to make it, run convert.py export --megatron {self._directory.path(self._step)}"
                )
                return
            time.sleep(0.05)

    def _running(self) -> bool:
        """Tell whether an export is running. Reports the failure of one that has ended."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        if code != 0:
            log_file = self._run_dir / "logs" / "hf-export.log"
            self._notify(f"the Hugging Face export of step {self._step} failed (code {code}); see {log_file}")
        self._process = None
        return False


def convert_command(checkpoint: Path, out: Path) -> list[str]:
    """Return the command of a converter process that ends with this process and replaces an existing export."""
    # It polls for this process: the kernel's death signal would come when the thread that started it ends.
    own = ProcessId.own()
    program = (
        "import sys; from megarl.common.process.processes import ProcessId, die_with; "
        f"die_with(ProcessId({own.pid}, {own.start_time}), 'trainer rank 0'); "
        "from megarl.checkpoint.convert.cli import main; sys.exit(main())"
    )
    paths = ["--megatron", str(checkpoint), "--hf", str(out)]
    return [sys.executable, "-c", program, "export", *paths, "--workers", "1", "--force"]


def _environment() -> dict[str, str]:
    """Return the child's environment, without torchrun's variables, because the child is not a rank."""
    from megarl.cluster.pool.pool_process import clean_environment

    return {
        **clean_environment(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_VISIBLE_DEVICES": "",
    }
