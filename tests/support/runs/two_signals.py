"""A second stop signal to a run, and what must then hold of its end."""

import os
import signal
import subprocess
import time
from pathlib import Path

from megarl.common.rundir.run_files import read_exit
from tests.support.checkout import ROOT
from tests.support.pool.leftovers import assert_nothing_left, marked

ENDS_S = 120.0
AGAIN_S = 2.5  # after which a second signal is a second request, also if the first one was late by a second


def launch(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start launch/local.sh in a process group of its own, as a shell does for what a user starts."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["launch/local.sh", str(config)], cwd=ROOT, env=marked(config.parent / "run"), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def press_twice(process: subprocess.Popen[bytes], number: signal.Signals, log: Path) -> None:
    """SIGINT goes to the whole process group, as Ctrl-C does; SIGTERM to the script alone, as `kill` does.

    The first signal must leave the launch running, or the test would not see what a second one does.
    """

    def press() -> None:
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)

    press()
    time.sleep(AGAIN_S)
    assert process.poll() is None, f"the first {number.name} alone has ended it:\n{log.read_text()[-4000:]}"
    press()


def check_end(process: subprocess.Popen[bytes], number: signal.Signals, log: Path, run_dir: Path, when: str) -> None:
    """All of it ends in time, because of a second signal `number`, with one message and without a traceback.

    The message and the exit record name the signal. The time is printed.
    """
    begun = time.monotonic()
    code = process.wait(timeout=ENDS_S)
    assert_nothing_left(run_dir, ENDS_S - (time.monotonic() - begun))
    print(f"{when}: all had ended {time.monotonic() - begun:.1f} s after the second signal")
    said = log.read_text()
    text = f"{when}:\n{said[-4000:]}"
    assert "Traceback" not in said, text
    how = [line for line in said.splitlines() if line.startswith("megarl: ") and "the same command " in line]
    assert code != 0 and len(how) == 1, text
    why = f"received a second stop signal ({number.name}); the same command resumes"
    assert why in how[0], text
    record = read_exit(run_dir)
    assert record is not None and record.status == "failed" and why in record.reason, f"{record}\n{text}"
