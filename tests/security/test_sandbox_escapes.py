"""Attempts to get out of the sandbox, or to harm the machine from inside it.

Each attempt is a program that prints `ESCAPED` if it succeeded. It is run twice: outside, by a plain interpreter in the
same state of the machine, where it succeeds; and in the sandbox, where it does not. What could do harm is bounded.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.support.attacks.escape_attempts import ALL, ATTEMPTS, ESCAPED, SECRETS, SHOWN, Host, host_in
from tests.support.checkout import ROOT
from tests.support.repository.needs import FAULTS, need
from tests.support.rewards.sandboxes import outside, run_sandboxed

pytestmark = pytest.mark.sandbox

AS_ROOT = os.geteuid() == 0
ORDINARY_USER = 54321
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with host_in(tmp_path_factory.mktemp("host")) as made:
        yield made


@pytest.mark.parametrize("name", list(ALL))
def test_an_attempt_succeeds_outside_and_fails_inside(
    name: str, host: Host, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    program = host.fill(ALL[name])
    if AS_ROOT or name in ATTEMPTS:
        shown = outside(program, **SECRETS)
        assert ESCAPED in shown.splitlines(), shown
    for key, value in SECRETS.items():
        monkeypatch.setenv(key, value)
    result = run_sandboxed(program)
    assert ESCAPED not in result.stdout, result.stdout
    assert result.status is not None, result.stderr  # it ended by itself: the attempt was made
    if AS_ROOT or name in ATTEMPTS:
        record_property(SHOWN, name)


def as_ordinary_user(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of a program that an ordinary user starts in this checkout."""
    return subprocess.run(
        arguments, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True,
        text=True, timeout=300, check=False, user=ORDINARY_USER, group=ORDINARY_USER, extra_groups=[],
    )  # fmt: skip


def python_of_ordinary_users() -> str | None:
    """This interpreter or the system's, if others than root can run megarl's sandbox with it."""
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            tried = as_ordinary_user(path, "-c", "import megarl.sandbox.runner")
        except PermissionError:  # root's own installation
            continue
        if tried.returncode == 0:
            return path
    return None


@pytest.mark.slow
@pytest.mark.skipif(not AS_ROOT, reason="all tests here run as an ordinary user")
def test_an_attempt_fails_in_the_sandbox_of_an_ordinary_user_too() -> None:
    """It is another one than root's: the program has the only id of a user namespace of its own."""
    python = python_of_ordinary_users()
    unreadable = "no Python 3.11 here, or not this checkout, can be read by others than root"
    need(FAULTS, unreadable if python is None else "")
    assert python is not None
    ended = as_ordinary_user(python, "-m", "tests.support.attacks.escape_attempts")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found.keys() > ALL.keys()
    for name, (shown, status) in found.items():
        assert ESCAPED not in shown and status is not None, (name, shown)
    no_rights, nobody = "0" * 16, "65534"
    assert found["the ids"][0].split() == [f"['{ORDINARY_USER}',", "'1']", nobody, nobody, no_rights, no_rights]


MACHINE_CODE = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret: getpid as a program of 32 bits calls it
code = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("ESCAPED" if code() == os.getpid() else "no")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor of another kind has no second kind of calls")
def test_calls_of_other_machines_end_the_program(record_property: Record) -> None:
    """The 32-bit calls of x86 have other numbers, so that a filter of numbers alone would let them pass."""
    shown = outside(MACHINE_CODE)
    assert ESCAPED in shown.splitlines(), f"this kernel runs no calls of 32 bits, so that nothing is shown: {shown}"
    assert run_sandboxed(MACHINE_CODE).status == -signal.SIGSYS
    record_property(SHOWN, "calls of other machines")
    # The convention x32, which few kernels have.
    assert run_sandboxed("import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 39)").status == -signal.SIGSYS


def test_the_sandbox_has_no_terminal_and_input_for_one_is_refused_before_the_kernel_looks_at_it() -> None:
    program = """
import errno, fcntl, os
for call in (0x5412, 0x541C):  # TIOCSTI, TIOCLINUX
    try:
        fcntl.ioctl(0, call, b"x")
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    os.open("/dev/tty", os.O_RDWR)
    print("a terminal")
except OSError:
    print("no terminal")
"""
    assert run_sandboxed(program).stdout.splitlines() == ["EPERM", "EPERM", "no terminal"]


def test_inherited_descriptors(record_property: Record) -> None:
    """A descriptor that a careless owner left open for children is not the program's."""
    program = "import os; print(sorted(int(name) for name in os.listdir('/proc/self/fd')))"
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    try:
        careless = subprocess.check_output([sys.executable, "-c", program], close_fds=False, text=True)
        assert str(reading) in careless
        # 3 is the listing's own
        assert run_sandboxed(program).stdout == "[0, 1, 2, 3]\n"
        record_property(SHOWN, "inherited descriptors")
    finally:
        os.close(reading)
        os.close(writing)


def test_the_program_has_no_rights() -> None:
    program = """
for line in open("/proc/self/status"):
    if line.split(":")[0] in ("Uid", "Gid", "Groups", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"):
        print(*line.replace(":", "").split())
"""

    def parts(text: str) -> dict[str, list[str]]:
        return {name: values for name, *values in map(str.split, text.splitlines())}

    lines = parts(run_sandboxed(program).stdout)
    if AS_ROOT:
        unguarded = parts(outside(program))
        assert int(unguarded["CapEff"][0], 16) and unguarded["Uid"][0] == "0", "a plain program has root's rights"
        assert int(lines["Seccomp"][0]) > int(unguarded["Seccomp"][0]) or unguarded["Seccomp"] == ["2"]
    for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(lines[name][0], 16) == 0, name
    assert lines["NoNewPrivs"] == ["1"] and lines["Seccomp"] == ["2"]
    assert "0" not in lines["Uid"] + lines["Gid"]
    if AS_ROOT:
        assert lines["Groups"] == []
