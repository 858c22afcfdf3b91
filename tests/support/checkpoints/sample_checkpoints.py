"""Checkpoints of one small file, for tests that need no model."""

import json
from pathlib import Path

from megarl.checkpoint.format.manifest import DamagedCheckpointError, FileEntry, Manifest, check_files
from megarl.checkpoint.save.directory import CheckpointDirectory


def make_checkpoint(directory: CheckpointDirectory, step: int, content: bytes = b"weights") -> Path:
    """A complete checkpoint of one file."""
    partial = directory.create_partial(step)
    (partial / "shard").write_bytes(content)
    (partial / "state.json").write_text(json.dumps({"step": step}))
    files = {name: FileEntry.of(partial / name) for name in ("shard", "state.json")}
    Manifest(step, files).write(partial)
    return directory.complete(step)


def verify(path: Path) -> list[str]:
    """Problems with the files of a checkpoint."""
    try:
        manifest = Manifest.read(path)
    except DamagedCheckpointError as error:
        return [str(error)]
    return check_files(path, manifest.files, manifest.files)
