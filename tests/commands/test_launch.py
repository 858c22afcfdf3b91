"""`megarl launch` waits for its script, which decides what a Ctrl-C or a SIGTERM means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.checkout import environment

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
        assert process.stdout.read().split() == [name, "saved"]
        assert process.wait(timeout=20) == 7
    finally:
        process.kill()
