"""Attempts to harm the machine from inside the sandbox by use: of processes, memory, files, output and time.

Each is bounded outside, where it passes the limit that holds inside.
"""

import os
import signal
import uuid
from pathlib import Path

import pytest

from megarl.sandbox.limits import Limits
from tests.support.rewards.sandboxes import outside, processes_with, run_sandboxed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

WAIT_S = 60.0


def limited_outside(program: str) -> str:
    return outside(program).strip()


FORK = """
import os, time
count = 0
try:
    for _ in range(60):
        if os.fork() == 0:
            time.sleep(30 if @inside@ else 1)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""


def test_a_fork_bomb() -> None:
    assert limited_outside(FORK.replace("@inside@", "0")) == "60"
    result = run_sandboxed(FORK.replace("@inside@", "1"), Limits(processes=20, cpu_s=30))
    assert 0 < int(result.stdout) <= 20
    endless = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run_sandboxed(endless, Limits(processes=20), timeout_s=2.0).limit in ("time", "cpu")


def test_a_bomb_of_threads() -> None:
    program = """
import threading
count, stop = 0, threading.Event()
try:
    for _ in range(60):
        threading.Thread(target=stop.wait).start()
        count += 1
except RuntimeError:
    pass
stop.set()
print(count)
"""
    assert limited_outside(program) == "60"
    assert 0 < int(run_sandboxed(program, Limits(processes=20, cpu_s=30)).stdout) <= 20


def test_a_flood_of_descriptors() -> None:
    program = """
import os
count = 0
try:
    for _ in range(200):
        os.open("/dev/null", os.O_RDONLY)
        count += 1
except OSError:
    pass
print(count)
"""
    assert limited_outside(program) == "200"
    assert 0 < int(run_sandboxed(program).stdout) < 64


def test_a_large_allocation() -> None:
    program = "x = bytearray(600 << 20); print(len(x) >> 20)"
    assert limited_outside(program) == "600"
    result = run_sandboxed(program)
    assert "MemoryError" in result.stderr and result.stdout == ""


CORE_DUMP = """
import os, resource, tempfile
os.chdir(tempfile.mkdtemp())
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
pid = os.fork()
if pid == 0:
    os.abort()
status = os.waitpid(pid, 0)[1]
for name in os.listdir():
    os.unlink(name)
print(hard, os.WIFSIGNALED(status), os.WCOREDUMP(status))
"""


def test_a_core_dump() -> None:
    """A pipe in core_pattern gets dumps whatever the limit is: there, only the limit is shown."""
    hard, aborted, dumped = outside(CORE_DUMP).split()
    assert hard != "0" and aborted == dumped == "True", (
        f"outside the sandbox a program that aborts leaves no core (limit {hard}), so that nothing is shown here: run "
        "the tests under `ulimit -H -c unlimited`"
    )
    hard, aborted, dumped = run_sandboxed(CORE_DUMP).stdout.split()
    assert (hard, aborted) == ("0", "True")
    assert dumped == "False" or Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")


def test_a_full_disk(tmp_path: Path) -> None:
    program = """
with open("@directory@/full", "wb") as file:
    for _ in range(100): file.write(bytes(1 << 20))
print("written")
"""
    assert limited_outside(program.replace("@directory@", str(tmp_path))) == "written"
    for directory in ("/scratch", "/dev/shm", "/tmp", "/", "/sandbox"):
        assert run_sandboxed(program.replace("@directory@", directory)).stdout == "", directory


def daemon_that_stays(name: str) -> str:
    """A program that ends and leaves a process, in a session of its own and with all of its descriptors closed."""
    return f"""
import ctypes, os, time
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
        for descriptor in (0, 1, 2): os.close(descriptor)
        os.write(writing, b"x")
        time.sleep(1000)
    os._exit(0)
os.read(reading, 1)
"""


def test_a_daemon_that_stays() -> None:
    name = f"m{uuid.uuid4().hex[:12]}"
    outside(daemon_that_stays(name))
    left = processes_with(name)
    assert len(left) == 1
    os.kill(left[0], signal.SIGKILL)
    wait_until(lambda: not processes_with(name), WAIT_S, "the daemon's end")
    assert run_sandboxed(daemon_that_stays(name)).status == 0
    assert processes_with(name) == []


def test_files_and_state_of_one_run_are_gone_in_the_next(tmp_path: Path) -> None:
    """A plain interpreter in one directory imports, before the next program, what the last one has left there."""
    write = "import os; open(@path@, 'w').write('x = 1'); os.environ['X'] = '1'; print('written')"
    left = {"PYTHONPATH": str(tmp_path)}
    assert outside(write.replace("@path@", f"'{tmp_path}/sitecustomize.py'"), **left) == "written\n"
    shown = outside("import os, sys; print('sitecustomize' in sys.modules)", **left)
    assert shown == "True\n" and (tmp_path / "sitecustomize.py").exists()
    assert run_sandboxed(write.replace("@path@", "'/scratch/sitecustomize.py'")).stdout == "written\n"
    look = "import os, sys; print(os.listdir('/scratch'), 'sitecustomize' in sys.modules, 'X' in os.environ)"
    assert run_sandboxed(look).stdout == "[] False False\n"
