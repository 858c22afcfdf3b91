"""Faults of the files of a run: stale handles as NFS gives them, and a checkpoint that has changed.

A container has no NFS server, so a library that is preloaded into all processes of a run (stale_files.c) gives the
answer in the place of the kernel: while the order `stale` is there, the files of the run directory that are named there
cannot be opened, looked at, renewed or replaced.
"""

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.2
SOURCE = Path(__file__).resolve().with_name("stale_files.c")
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
    """Return whether the run has set a damaged checkpoint aside."""
    return any(checkpoint.parent.glob(f"{checkpoint.name}.damaged*"))
