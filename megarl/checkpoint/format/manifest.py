"""The manifest of a checkpoint: every file with its size and digest. It is written last and completes the checkpoint.

Digests are BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), several times faster than SHA-2 on a processor without
SHA instructions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from megarl.common.files import inside
from megarl.common.rundir.run_files import ExitRecordError, read_exit
from megarl.config.schema import Config
from megarl.models.hf.model_files import step_name

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK = 2**18  # bytes; fits into a core's cache
_CHECKERS = 4  # files read at the same time


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from its manifest; the message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """The size in bytes and the digest (hexadecimal) of one file."""

    bytes: int
    blake3: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Read `path` once and return its entry. Raises OSError if it cannot be read."""
        hasher, size = blake3(), 0
        buffer = memoryview(bytearray(_CHUNK))  # for all chunks: allocating memory costs as much as reading
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                hasher.update(buffer[:count])
                size += count
        return cls(size, hasher.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by path relative to its directory; `step`: the number of training steps done."""

    step: int
    files: dict[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        """The total size of all listed files, without manifest.json."""
        return sum(entry.bytes for entry in self.files.values())

    def write(self, directory: Path) -> None:
        """Write and fsync `directory`/manifest.json atomically."""
        content = {"format": FORMAT, "step": self.step, "files": {k: asdict(v) for k, v in sorted(self.files.items())}}
        write_durably(directory / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of `directory`.

        Raises DamagedCheckpointError if it does not exist, is unreadable or has another format version.
        """
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise DamagedCheckpointError(f"{path}: format {content['format']}, but this version reads {FORMAT}")
            return cls(int(content["step"]), {name: FileEntry(**entry) for name, entry in content["files"].items()})
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{directory} has no {MANIFEST}: it was never completed") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DamagedCheckpointError):
                raise
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error

    def share(self, rank: int, ranks: int) -> list[str]:
        """Return the files that `rank` of `ranks` checks, balanced by size; each file has exactly one rank."""
        loads = [0] * ranks
        mine = []
        for name, entry in sorted(self.files.items(), key=lambda item: (-item[1].bytes, item[0])):
            owner = loads.index(min(loads))
            loads[owner] += entry.bytes
            if owner == rank:
                mine.append(name)
        return mine


def check_files(directory: Path, files: Mapping[str, FileEntry], names: Iterable[str]) -> list[str]:
    """Compare the named files with their entries; return a line for each damaged one."""

    def check(name: str) -> str | None:
        path, expected = directory / name, files[name]
        try:
            inside(directory, name)
            size = path.stat().st_size
            if size != expected.bytes:
                return f"{path}: {size} bytes, the manifest says {expected.bytes}"
            found = FileEntry.of(path)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        except ValueError as error:
            return str(error)
        if found == expected:
            return None
        return f"{path}: digest {found.blake3[:16]}…, the manifest says {expected.blake3[:16]}…"

    # Reading and hashing release the GIL; checking several files at a time halves the load time.
    with ThreadPoolExecutor(min(_CHECKERS, os.cpu_count() or 1), thread_name_prefix="checkpoint-digest") as pool:
        return [problem for problem in pool.map(check, names) if problem is not None]


def write_durably(path: Path, content: bytes) -> None:
    """Write `path` so that a crash leaves either the old or the new file: fsync, rename, fsync of the directory.

    Only one process at a time may write it. It replaces what a killed one left.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not set it
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Make the content of a file durable, or the renames inside a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def already_finished(config: Config) -> str | None:
    """Return a message if the run of this config has finished and is saved; None if a start has work to do.

    Finished means: its last start recorded its end after at least `run.steps`, with the checkpoint of that step and the
    requested export.
    """
    if config.checkpoint.resume != "auto":
        return None
    try:
        record = read_exit(config.run_dir)
    except (ExitRecordError, OSError):
        return None
    if record is None or record.status != "finished" or record.step < config.run.steps:
        return None
    if not (config.checkpoint_dir / step_name(record.step) / MANIFEST).is_file():
        return None
    if config.run.export and not (config.run_dir / "hf").is_dir():
        return None
    return (
        f"already finished: {record.step} of {config.run.steps} steps in {config.run_dir}; nothing was started or "
        f"moved. To continue, raise run.steps; to start afresh, set checkpoint.resume=never, which moves the results "
        f"to {config.run_dir / 'previous'}, or another run.dir"
    )
