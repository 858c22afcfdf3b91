"""Faults of the files of a run: a full disk, stale handles as NFS gives them, a checkpoint that has changed.

A small file system in memory for the directory of one run can be filled without harm to anything else. A container has
no NFS server, so a library that is preloaded into all processes of a run (stale_files.c) gives the answer in the place
of the kernel: while the order `stale` is there, the files of the run directory that are named there cannot be opened,
looked at, renewed or replaced.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
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


SOURCE = Path(__file__).resolve().with_suffix(".c")
ORDER = "stale"
COMPILE_S = 60.0


def why_no_handles() -> str:
    """Return why no handle can be made stale here; "" if it can."""
    return "" if shutil.which("gcc") else "gcc, which compiles benchmarks/lib/stale_files.c, is not there"


def preloading(run_dir: Path, orders: Path) -> dict[str, str]:
    """Compile the library into the directory of the orders; return the variables for the processes of the run.

    Raises CalledProcessError if it cannot be compiled.
    """
    orders.mkdir(exist_ok=True)
    library = orders / "stale.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
    others = os.environ.get("LD_PRELOAD", "")
    preloaded = f"{library}:{others}" if others else str(library)
    return {"LD_PRELOAD": preloaded, "SOAK_STALE_DIR": str(run_dir), "SOAK_STALE_ORDER": str(orders / ORDER)}


def spoil(orders: Path, seconds: float, until: Callable[[], bool]) -> Counter[str]:
    """Make the handles stale for `seconds`, or until `until()`; return how often, by the name of the file."""
    begun, order = time.monotonic(), orders / ORDER
    order.touch()
    try:
        while time.monotonic() - begun < seconds and not until():
            time.sleep(POLL_S)
    finally:
        order.unlink()
    hits = order.with_name(f"{ORDER}.hits")
    lines = hits.read_text(encoding="utf-8").splitlines() if hits.is_file() else []
    hits.unlink(missing_ok=True)
    return Counter(lines)


def complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints in the directory of a run's checkpoints, oldest first."""
    found = sorted(directory.glob("iter_*"))
    return [path for path in found if path.suffix == "" and (path / "manifest.json").is_file()]


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Change one byte of a shard or of the manifest of a checkpoint; return the name of the file."""
    path = rng.choice([*sorted(checkpoint.glob("*.distcp")), checkpoint / "manifest.json"])
    content = bytearray(path.read_bytes())
    # In the second half: a manifest begins with the number of the step, which no digest covers.
    content[rng.randrange(len(content) // 2, len(content))] ^= 1 << rng.randrange(7)
    path.write_bytes(content)
    return path.name


def refused(checkpoint: Path) -> bool:
    """Tell whether the run has set a damaged checkpoint aside."""
    return any(checkpoint.parent.glob(f"{checkpoint.name}.damaged*"))
