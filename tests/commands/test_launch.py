"""`megarl launch` waits for its script, which decides what a Ctrl-C or a SIGTERM means."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.support.checkout import environment
from tests.support.waiting import wait_until

# A script as launch/local.sh: it traps the signals, and ends in its own time.
SCRIPT = """
trap 'echo INT; asked=1' INT
trap 'echo TERM; asked=1' TERM
echo up
until [ -n "$asked" ]; do sleep 0.1; done
sleep 1; echo saved; exit 7
"""
LAUNCH = "import sys; from megarl.commands.launch import run_script; sys.exit(run_script(['bash', '-c', sys.argv[1]]))"


@pytest.mark.parametrize(
    ("to_group", "number", "name"), [(True, signal.SIGINT, "INT"), (False, signal.SIGTERM, "TERM")]
)
def test_the_script_ends_in_its_own_time(to_group: bool, number: signal.Signals, name: str) -> None:
    """Ctrl-C sends SIGINT to the whole group; a SIGTERM to the command alone is passed on."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, SCRIPT], env=environment(), text=True, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.communicate(timeout=60)[0].split() == [name, "saved"]
        assert process.returncode == 7
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


EARLY = """
import os, signal, subprocess, sys
from megarl.commands.launch import run_script
class Early(subprocess.Popen):
    def __init__(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*arguments)
        self.stdout = None
subprocess.Popen = Early
sys.exit(run_script(['bash', '-c', 'trap "exit 7" TERM; while true; do sleep 0.1; done']))
"""


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sigterm_while_the_script_is_being_started_is_passed_on() -> None:
    """Else this process would end by it, and the job would go on."""
    process = subprocess.Popen([sys.executable, "-c", EARLY], env=environment(), start_new_session=True)
    try:
        assert process.wait(timeout=60) in (7, 256 - signal.SIGTERM)  # the latter before bash has set its trap
        wait_until(lambda: not group_lives(process.pid), 20, "the end of the script")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
