"""The converter called in this process or in a forked one, with units small enough that a tiny model has many."""

import contextlib
import io
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.checkpoint.convert import cli, workers
from tests.support.checkpoints.kill_points import kill_points

ITEM_BYTES, UNIT_BYTES = 6_000, (40_000, 40_000)


def convert(*arguments: Any) -> str:
    """Run a command; its standard output. AssertionError with its message if it fails."""
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def run(*arguments: Any, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(workers, "UNIT_BYTES", UNIT_BYTES),
        mock.patch.object(workers.split, "__defaults__", (ITEM_BYTES,)),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def refused(*arguments: Any) -> str:
    """The message of a command that must fail, in one piece, without a traceback."""
    code, _, err = run(*arguments)
    assert code == 1 and "Traceback" not in err and err.startswith("convert.py: ")
    return err


def run_forked(*arguments: Any, kill_after: float | None = None, stdout: Path | None = None, **environment: str) -> int:
    """Run a command in a process of its own, killed after `kill_after` seconds; its exit code, -9 if it was killed.

    `stdout`: a file for all it says.
    """

    def child() -> None:
        os.setsid()
        with kill_points():
            code, out, err = run(*arguments, **environment)
        if stdout is not None:
            stdout.write_text(out + err)
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    if kill_after is not None:
        process.join(kill_after)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
    process.join(120)
    assert process.exitcode is not None, f"{arguments} did not end within 120 s"
    return process.exitcode


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def wait_for_lock(out: Path) -> None:
    """Wait until killed workers have let go of the output (they die with their parent, a moment later)."""
    import fcntl

    path = out.with_name(f".{out.name}.converting") / "lock"
    deadline = time.monotonic() + 10
    while path.exists():
        with path.open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                assert time.monotonic() < deadline, f"{path} is still held"
                time.sleep(0.02)
