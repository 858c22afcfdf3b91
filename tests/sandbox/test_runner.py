"""Runs of programs in the sandbox: what they get and give, the limits, the queue, and that nothing is left of them."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.sandbox.limits import Limits, SandboxBusyError, SandboxError
from megarl.sandbox.runner import Sandbox
from tests.support.checkout import ROOT
from tests.support.rewards.sandboxes import processes_with, run_sandboxed, sandboxes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.sandbox

LONG_S = 60.0
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}.encode(), 0, 0, 0)\n"  # PR_SET_NAME, for processes_with


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def unique_name() -> str:
    return f"m{uuid.uuid4().hex[:12]}"  # the kernel keeps 15 characters


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Limits(timeout_s=LONG_S, cpu_s=30), slots=2, queue_s=LONG_S)
    yield made
    made.close()


def test_output_status_and_input_of_a_program() -> None:
    result = run_sandboxed("import sys\nprint(input()[::-1])\nprint('ü', file=sys.stderr)\nsys.exit(3)", stdin="abc\n")
    assert (result.stdout, result.stderr, result.status, result.limit) == ("cba\n", "ü\n", 3, None)
    assert not result.ok


def test_an_exception_is_reported_with_its_line() -> None:
    result = run_sandboxed("def f():\n    return 1 / 0\nf()")
    assert 'program.py", line 2, in f' in result.stderr and "return 1 / 0" in result.stderr
    assert result.status == 1


def test_a_signal_is_reported() -> None:
    assert run_sandboxed("import os; os.kill(os.getpid(), 9)").status == -signal.SIGKILL


def test_input_that_is_not_read_and_input_that_is_large() -> None:
    large = "x" * (1 << 20)
    assert run_sandboxed("print(1)", stdin=large).stdout == "1\n"
    assert run_sandboxed("import sys; print(len(sys.stdin.read()))", stdin=large).stdout == f"{1 << 20}\n"


def test_the_standard_library_works() -> None:
    program = """
import asyncio, collections, decimal, fractions, hashlib, json, math, multiprocessing, os, random, re, shutil, socket
import sqlite3, statistics, subprocess, sys, tempfile, threading, zlib
from concurrent.futures import ThreadPoolExecutor
async def later():
    await asyncio.sleep(0.01)
    return 1
assert asyncio.run(later()) == 1
assert list(ThreadPoolExecutor(2).map(abs, [-1, -2])) == [1, 2]
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("x")
    shutil.copy2(folder + "/a", folder + "/b")
    assert os.listdir(folder).sort() is None
assert subprocess.run([sys.executable, "-c", "print(2)"], capture_output=True).stdout == b"2\\n"
context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
child = context.Process(target=queue.put, args=(5,))
child.start()
assert queue.get() == 5
child.join()
assert hash("a") == int(subprocess.check_output([sys.executable, "-c", "print(hash('a'))"]))  # the same in each run
print("fine")
"""
    result = run_sandboxed(program, timeout_s=LONG_S)
    assert result.stdout == "fine\n", result.stderr


def test_packages_can_be_imported_only_if_they_are_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("packages")
    folder.chmod(0o755)  # the program runs as a user who owns nothing
    (folder / "given_package.py").write_text("value = 7\n")
    program = "import given_package; print(given_package.value)"
    assert "ModuleNotFoundError" in run_sandboxed(program).stderr
    sandbox = Sandbox(Limits(cpu_s=30), slots=1, packages=[str(folder)])
    result = sandbox.run_now(program, timeout_s=LONG_S)
    sandbox.close()
    assert result.stdout == "7\n", result.stderr


@pytest.mark.parametrize("packages", [["some/folder"], ["/nowhere/at/all"], ["/usr/lib:/lib"]])
def test_packages_that_are_no_directory_are_refused(packages: list[str]) -> None:
    with pytest.raises(ValueError, match="not the absolute path of a directory"):
        Sandbox(packages=packages)


# --- limits


@pytest.mark.parametrize(
    ("program", "limits", "limit"),
    [
        ("import time; time.sleep(1000)", Limits(timeout_s=1.0), "time"),
        ("while True: pass", Limits(timeout_s=LONG_S, cpu_s=1), "cpu"),
        ("while True: print('x' * 1000)", Limits(timeout_s=LONG_S, output_kib=64), "output"),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", Limits(timeout_s=LONG_S), "output"),
        (
            "import os, time\nfor _ in range(8):\n    if not os.fork(): break\nx = bytearray(60 << 20)\ntime.sleep(99)",
            Limits(timeout_s=LONG_S, memory_mib=200),
            "memory",
        ),
        (
            "import mmap, os, time\nfor _ in range(4):\n    if not os.fork(): break\n"
            "x = mmap.mmap(-1, 90 << 20)\nx.write(bytes(90 << 20))\ntime.sleep(99)",  # shared, not the process's own
            Limits(timeout_s=LONG_S, memory_mib=300),
            "memory",
        ),
        (
            "i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1",
            Limits(timeout_s=LONG_S, cpu_s=50, entries=1000),
            "disk",
        ),
    ],
)
def test_a_limit_ends_the_run(program: str, limits: Limits, limit: str) -> None:
    result = run_sandboxed(program, limits, timeout_s=limits.timeout_s)
    assert result.limit == limit
    assert len(result.stdout) <= limits.output_kib << 10 and len(result.stderr) <= limits.output_kib << 10


def test_the_scratch_directory_is_bounded_and_of_one_run() -> None:
    fill = "f = open('full', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()"
    result = run_sandboxed(fill, Limits(scratch_mib=8, cpu_s=30))
    assert "OSError" in result.stderr
    again = "".join(f"f{i} = open('part{i}', 'wb'); f{i}.write(bytes(1 << 20)); f{i}.flush()\n" for i in range(12))
    assert "No space left on device" in run_sandboxed(again, Limits(scratch_mib=8, cpu_s=30)).stderr
    assert run_sandboxed("import os; print(os.listdir())").stdout == "[]\n"


@pytest.mark.parametrize("value", [{"timeout_s": 0}, {"processes": -1}, {"memory_mib": 8}, {"timeout_s": float("nan")}])
def test_limits_that_mean_nothing_are_refused(value: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(value))):
        Limits(**value)  # type: ignore[arg-type]


# --- runs at once


def test_runs_are_bounded_and_the_others_wait_their_turn(sandbox: Sandbox) -> None:
    async def many() -> list[str]:
        results = await asyncio.gather(*(sandbox.run(f"print({number})") for number in range(12)))
        return [result.stdout for result in results]

    assert asyncio.run(many()) == [f"{number}\n" for number in range(12)]


async def test_a_wait_for_a_place_is_bounded_and_named() -> None:
    busy = Sandbox(Limits(timeout_s=LONG_S, cpu_s=30), slots=1, queue_s=0.5)
    first = asyncio.ensure_future(busy.run("import time; time.sleep(1000)"))
    await eventually(lambda: bool(sandboxes_of(os.getpid())))
    with pytest.raises(SandboxBusyError, match=r"waited 0\.5 s for one of the 1 places"):
        await busy.run("print(1)")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    busy.close()
    assert sandboxes_of(os.getpid()) == []


# --- nothing is left


def started(name: str) -> None:
    wait_until(lambda: bool(processes_with(name)), LONG_S, f"process {name}")


def gone(name: str) -> None:
    wait_until(lambda: not processes_with(name), LONG_S, f"the end of process {name}")


async def test_a_cancelled_run_leaves_nothing(sandbox: Sandbox) -> None:
    name = unique_name()
    run = asyncio.ensure_future(sandbox.run(NAMED.format(name=name) + "import time; time.sleep(1000)"))
    await eventually(lambda: bool(processes_with(name)))
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    gone(name)


async def test_close_ends_what_runs(sandbox: Sandbox) -> None:
    name = unique_name()
    run = asyncio.ensure_future(sandbox.run(NAMED.format(name=name) + "import time; time.sleep(1000)"))
    await eventually(lambda: bool(processes_with(name)))
    await asyncio.to_thread(sandbox.close)
    assert processes_with(name) == []
    with pytest.raises(SandboxError):
        await run


async def test_runs_that_wait_when_the_sandbox_is_closed_are_reported(sandbox: Sandbox) -> None:
    runs = [asyncio.ensure_future(sandbox.run("import time; time.sleep(1000)")) for _ in range(5)]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(sandbox.close)
    results = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(result) for result in results] == [SandboxError] * 5


def test_nothing_is_left_when_the_process_that_uses_the_sandbox_is_killed() -> None:
    name = unique_name()
    program = NAMED.format(name=name) + "import time; time.sleep(1000)"
    user = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from megarl.sandbox.runner import Sandbox; Sandbox().run_now(sys.stdin.read(), timeout_s=900)",
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert user.stdin is not None
    user.stdin.write(program)  # not as an argument, in which its name would be found before it runs
    user.stdin.close()
    try:
        started(name)
        user.kill()
        user.wait(LONG_S)
        gone(name)
    finally:
        user.kill()


RUNS_TO_LIMITS = """
import os
from megarl.sandbox.limits import Limits
from tests.support.rewards.sandboxes import run_sandboxed

run_sandboxed("print(1)")  # what is made once
before = len(os.listdir("/proc/self/fd"))
program = "open('file', 'w').write('x')\\nfor _ in range(10**8): print(1)"
for limits in (Limits(), Limits(timeout_s=0.3), Limits(output_kib=1)):
    assert run_sandboxed(program, limits, timeout_s=limits.timeout_s).limit is not None
assert len(os.listdir("/proc/self/fd")) <= before, os.listdir("/proc/self/fd")
mounts = open("/proc/self/mountinfo").read()
assert not [word for word in ("/scratch", "/newroot", "bwrap") if word in mounts]
"""


def test_runs_leave_no_file_mount_or_descriptor() -> None:
    """In a process of its own: other tests' threads open descriptors in this one."""
    subprocess.run([sys.executable, "-c", RUNS_TO_LIMITS], cwd=ROOT, check=True)
    assert not [path.name for path in Path("/tmp").iterdir() if "bwrap" in path.name or "bubblewrap" in path.name]


def test_a_run_that_is_stopped_while_it_starts_leaves_nothing() -> None:
    """Tried at many moments of the start: before the namespaces, between them and the program, and after."""
    size = random.randrange(1000, 60000)  # by which the command lines of these runs are known
    sandbox = Sandbox(Limits(cpu_s=30, scratch_mib=size), slots=1)
    for step in range(20):
        result = sandbox.run_now("import time; time.sleep(1000)", timeout_s=0.0002 + step * 0.001)
        assert result.limit == "time"
        assert processes_with(f"--size {size << 20}".replace(" ", "\0")) == []  # at once
    sandbox.close()


def test_a_user_that_is_killed_while_a_run_starts_leaves_nothing() -> None:
    size = random.randrange(1000, 60000)
    program = f"""
from megarl.sandbox.runner import Sandbox
from megarl.sandbox.limits import Limits
print("ready", flush=True)
input()
Sandbox(Limits(scratch_mib={size})).run_now("import time; time.sleep(1000)", timeout_s=900)
"""
    mark = f"--size {size << 20}".replace(" ", "\0")
    for step in range(8):
        user = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert user.stdout is not None and user.stdin is not None
        assert user.stdout.readline() == "ready\n"
        user.stdin.write("\n")
        user.stdin.flush()
        time.sleep(0.001 + step * 0.002)
        user.kill()
        user.communicate(timeout=LONG_S)
        wait_until(lambda: not processes_with(mark), LONG_S, "the end of what had begun to start")


def test_the_init_of_the_namespace_shows_nothing_of_itself() -> None:
    """Without root's id it has the program's, and no limits: its memory must not be within reach."""
    assert run_sandboxed("import os; print(os.getppid(), os.listdir('/proc/1'))").stdout == "1 []\n"
