"""Process identity, death with the parent, sweeping: on real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megarl.common.process.processes import ProcessId, descendants, is_alive, kill, sweep
from tests.support.waiting import wait_until

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def start(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_is_alive_until_it_ends_and_a_reused_pid_is_another_one() -> None:
    process = start("import time; print('up', flush=True); time.sleep(600)")
    line(process)
    identity = ProcessId.of(process.pid)
    assert is_alive(identity)
    assert not is_alive(ProcessId(identity.pid, identity.start_time - 1))
    process.kill()
    wait_until(lambda: not is_alive(identity), 60, "the killed process")  # not yet waited for: a zombie counts as gone
    process.wait(timeout=60)
    assert not is_alive(identity)
    with pytest.raises(ProcessLookupError):
        ProcessId.of(identity.pid)


def test_kill_spares_a_later_process_of_the_same_pid() -> None:
    process = start("import time; print('up', flush=True); time.sleep(600)")
    line(process)
    identity = ProcessId.of(process.pid)
    kill([ProcessId(identity.pid, identity.start_time + 1)], signal.SIGKILL)
    time.sleep(0.2)
    assert is_alive(identity)
    kill([identity], signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL


def test_descendants_are_found_through_generations_and_swept_although_they_ignore_sigterm() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"
    process = start(child)
    line(process)
    found = descendants(process.pid)
    assert len(found) == 1
    assert ProcessId.of(process.pid) in descendants(os.getpid())
    assert sweep(found, grace_s=0.3) == set()
    assert process.wait(timeout=60) == 0


DIES_WITH_PARENT = """
import os, subprocess, sys, time
from megarl.common.process.processes import die_with_parent
parent = os.getpid()
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],
                         preexec_fn=lambda: die_with_parent(parent))
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_tied_child_goes_with_its_killed_parent() -> None:
    process = start(DIES_WITH_PARENT)
    child = ProcessId.of(int(line(process)))
    assert is_alive(child)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    wait_until(lambda: not is_alive(child), 60, "the child of the killed process")


WATCHES = """
import os, sys, time
from megarl.common.process.processes import ProcessId, die_with
die_with(ProcessId.of(int(sys.argv[1])), 'the test', interval_s=0.1)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_watcher_ends_with_a_process_that_is_not_its_parent() -> None:
    watched = start("import time; print('up', flush=True); time.sleep(600)")
    line(watched)
    watcher = start(WATCHES, str(watched.pid))
    line(watcher)
    assert watcher.poll() is None
    watched.kill()
    watched.wait(timeout=60)
    assert watcher.wait(timeout=60) == 1
