"""Damages the newest checkpoint of a run, as a bad disk does, and tells whether the run has refused it."""

from __future__ import annotations

import random
from pathlib import Path


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
