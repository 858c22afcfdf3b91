"""A small file system in memory for the directory of one run, which can be filled without harm to anything else."""

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = "512m"
CHUNK = b"\0" * (1 << 20)
FILLER = ".soak-filler"
POLL_S = 0.2
MOUNT_S = 30.0  # for mount and umount


def why_no_disk() -> str:
    """Return why a file system cannot be mounted here; "" if it can."""
    if os.geteuid() != 0:
        return "only root may mount a small file system for the run directory"
    with tempfile.TemporaryDirectory(prefix="soak-disk-") as directory:
        try:
            _mount(Path(directory))
        except (OSError, subprocess.SubprocessError) as error:
            return f"no file system can be mounted for the run directory: {error}"
        _unmount(Path(directory))
    return ""


@contextmanager
def small_disk(run_dir: Path) -> Iterator[None]:
    """Mount the file system at `run_dir`; at the end unmount it, and leave its files in a directory of that name."""
    run_dir.mkdir(parents=True)
    _mount(run_dir)
    try:
        yield
    finally:
        kept = run_dir.with_name(f"{run_dir.name}.kept")
        shutil.copytree(run_dir, kept, symlinks=True, ignore=_sockets)
        _unmount(run_dir)
        run_dir.rmdir()
        kept.rename(run_dir)


def fill(run_dir: Path, seconds: float, until: Callable[[], bool]) -> float:
    """Fill the file system of `run_dir` for `seconds`, or until `until()`; return how long it was full.

    Raises ValueError if it is not a file system of its own.
    """
    if not os.path.ismount(run_dir):
        raise ValueError(f"{run_dir} is no file system of its own and is not filled")
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < seconds and not until():
            fill_up(run_dir)  # what the run frees meanwhile is taken too
            time.sleep(POLL_S)
    finally:
        (run_dir / FILLER).unlink(missing_ok=True)
    return time.monotonic() - begun


def fill_up(run_dir: Path) -> None:
    """Fill the file system of `run_dir`, and leave it full.

    Raises ValueError if it is not a file system of its own.
    """
    if not os.path.ismount(run_dir):
        raise ValueError(f"{run_dir} is no file system of its own and is not filled")
    with (run_dir / FILLER).open("ab", buffering=0) as file:
        try:
            while file.write(CHUNK) == len(CHUNK):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _sockets(directory: str, names: list[str]) -> list[str]:
    """Return the names of sockets and pipes, which cannot be copied."""
    paths = [Path(directory, name) for name in names]
    return [path.name for path in paths if not path.is_symlink() and not path.is_file() and not path.is_dir()]


def _mount(directory: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "soak", str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=MOUNT_S)


def _unmount(directory: Path) -> None:
    subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True, timeout=MOUNT_S)
