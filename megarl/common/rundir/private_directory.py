"""The private directory of a run on one host, for sockets and temporary files: mode 0700, an unpredictable name.

It is below the system's temporary directory, because the path of a Unix socket may have 107 bytes at most. It records
the process that owns it. The owner removes it at its end. If the owner was killed, the guardian removes it, else the
next start of the same user. Named semaphores and shared memory have no directory, so their names begin with that of the
private directory and they are removed with it.
"""

import contextlib
import logging
import multiprocessing
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import shared_memory
from pathlib import Path

import msgspec

from megarl.common.process.processes import ProcessId, has_ended, this_place

# The place of torch's compiled kernels, from which code is loaded: a directory that only its user writes to.
#
# torch's own default, /tmp/torchinductor_USER (torch 2.13, _inductor/runtime/cache_dir_utils.py), is a name that
# another user can take first, and torch does not look whose directory it is.

logger = logging.getLogger(__name__)

KERNEL_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_kernels(otherwise: Callable[[], Path]) -> None:
    """Let torch, in this process and its later children, keep kernels for later runs of the user.

    Does nothing if the environment names a directory, which is the user's choice. The directory is
    $XDG_CACHE_HOME/megarl/torchinductor, ~/.cache by default. If it cannot be made, or others may write to it, kernels
    are kept for this run only, in the directory of mode 0700 that `otherwise` returns.
    """
    if KERNEL_CACHE_VARIABLE in os.environ:
        return
    try:
        os.environ[KERNEL_CACHE_VARIABLE] = str(_of_user())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        directory = otherwise()
        logger.warning("compiled kernels are kept only for this run, in %s: %s", directory, error)
        os.environ[KERNEL_CACHE_VARIABLE] = str(directory / "torchinductor")


def _of_user() -> Path:
    """Return the directory. Raises PermissionError if it is another user's or others may write to it, or OSError."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"
    directory = base / "torchinductor"
    for each in (base, directory):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)  # not in one call: parents are made by the umask
        status = each.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{each} belongs to another user, or others may write to it (chmod go-w)")
    return directory


VARIABLE = "MEGARL_PRIVATE_DIRECTORY"  # the environment variable by which a run's processes find it
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "megarl-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp makes it
_OWNER = "owner.json"
# Ray appends 69 bytes, `/ray/session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store`, and the name has 16.
_LONGEST_BASE = 20


@dataclass(frozen=True)
class Owner:
    """Identifies the process that owns a directory, and the place where its pid means something."""

    process: ProcessId
    place: str


def make_private_directory() -> Path:
    """Make a directory that this process owns, with the subdirectories `ray` and `tmp`."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
    (directory / _OWNER).write_bytes(msgspec.json.encode(Owner(ProcessId.own(), this_place())))
    for name in ("ray", "tmp"):
        (directory / name).mkdir(mode=0o700)
    return directory


def use_private_directory(directory: Path) -> None:
    """Let this process and its later children put temporary files and sockets there, and if need be compiled
    kernels.
    """
    tmp = str(directory / "tmp")
    os.environ.update({VARIABLE: str(directory), "TMPDIR": tmp, "VLLM_RPC_BASE_PATH": tmp})
    tempfile.tempdir = None  # it is looked up once
    keep_kernels(lambda: directory / "tmp")


def remove_private_directory(directory: Path) -> None:
    """Remove the directory and the named semaphores and shared memory of its processes. Repeatable, never raises."""
    for path in _shared(directory):
        with contextlib.suppress(OSError):  # gone, or refused by the system
            path.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def sweep_dead_directories() -> list[Path]:
    """Remove the private directories of this user whose owner is dead; return them."""
    removed = []
    for directory in sorted(_base().glob(_PREFIX + "*")):
        owner = _owner(directory)
        if owner is not None and has_ended(owner.process, owner.place):
            remove_private_directory(directory)
            removed.append(directory)
    if removed:
        logger.info("removed the remains of dead runs: %s", ", ".join(map(str, removed)))
    return removed


def name_shared_memory() -> None:
    """Mark the names of this process's semaphores and shared memory, and its children's semaphores, with their run.

    Does nothing outside a run. multiprocessing has no public way: the prefix of semaphores is part of the process's
    configuration, which its children inherit; that of shared memory belongs to a module, and is set in each process.
    """
    directory = os.environ.get(VARIABLE)
    if directory is not None:
        prefix = _tag(Path(directory))
        multiprocessing.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]
        # A name has 14 characters at most: a slash, the eight of the directory, and four random ones.
        shared_memory._SHM_NAME_PREFIX = f"/{prefix}"  # type: ignore[attr-defined]


def _base() -> Path:
    chosen = Path(tempfile.gettempdir())
    return chosen if len(os.fsencode(chosen)) <= _LONGEST_BASE else Path("/tmp")


def _tag(directory: Path) -> str:
    return directory.name.removeprefix(_PREFIX)


def _shared(directory: Path) -> Iterator[Path]:
    """Yield the named semaphores and shared memory of the directory's processes, as far as this user owns them."""
    if not _NAME.fullmatch(directory.name):
        return
    tag = re.escape(_tag(directory))
    # vLLM names the memory that workers on the CPU share after the file by which they find each other.
    files = "|".join(re.escape(path.name) for path in directory.glob("tmp/vllm_dist_*"))
    ours = re.compile(rf"sem\.{tag}-.*|{tag}[0-9a-f]{{4,}}" + (rf"|({files})-.*" if files else ""))
    with contextlib.suppress(OSError):  # missing, or cannot be listed
        for path in sorted(SHARED_MEMORY.iterdir()):
            if ours.fullmatch(path.name) and is_own(path):
                yield path


def is_own(path: Path) -> bool:
    """Return whether a file is there and belongs to this user."""
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:  # another process has removed it
        return False


def _owner(directory: Path) -> Owner | None:
    """Return the owner of a private directory of this user; None if it is none, or not complete yet."""
    try:
        status = directory.lstat()
        private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
        if not private or status.st_uid != os.getuid() or not _NAME.fullmatch(directory.name):
            return None
        return msgspec.json.decode((directory / _OWNER).read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
