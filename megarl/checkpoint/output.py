"""An output directory that appears by one rename when it is whole, and can be continued until then.

Beside OUT, `.OUT.converting/` holds `output/` (what becomes OUT), `plan.json` (what is being converted) and a file
per finished unit. Killed before the rename, it is continued; killed after it, only the leftovers are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from megarl.checkpoint import faults
from megarl.checkpoint.errors import ConversionError
from megarl.checkpoint.manifest import fsync_directory, write_durably

_PLAN = "plan.json"


class Output:
    """`out` and the work on it. Only one process at a time may hold it (`lock`); forked workers share the lock."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.work = self.out.with_name(f".{self.out.name}.converting")
        self.partial = self.work / "output"
        self._lock: IO[bytes] | None = None

    def refuse_existing(self, *, force: bool, resume: bool) -> None:
        """ConversionError if OUT exists, or an unfinished conversion does, and no option says what to do with it."""
        if self.out.exists() and not force and not (resume and self.work.exists()):
            raise ConversionError(f"{self.out} exists already; choose another directory, or overwrite it with --force")
        if self.work.exists() and not (force or resume):
            raise ConversionError(
                f"{self.work} holds an unfinished conversion: continue it with --resume, or start again with --force"
            )
        if resume and not self.work.exists():
            raise ConversionError(f"there is nothing to resume: {self.work} does not exist")

    def lock(self) -> None:
        """ConversionError if another process is writing here."""
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = (self.work / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConversionError(f"another process is converting into {self.out}; wait for it or end it") from None

    def release(self) -> None:
        """Let go of the lock, if it is held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, plan: dict[str, Any]) -> None:
        """Start afresh: forget whatever is there."""
        for path in self.work.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.partial.mkdir()
        write_durably(self.work / _PLAN, json.dumps(plan).encode())

    def resume(self, plan: dict[str, Any]) -> bool:
        """Check that the unfinished work is of the same plan. False if it is complete but for its leftovers."""
        path = self.work / _PLAN
        if not path.is_file():
            if any(self.partial.glob("*")):
                raise ConversionError(f"{self.work} has no {_PLAN}; start again with --force")
            self.begin(plan)
            return True
        if json.loads(path.read_text()) != json.loads(json.dumps(plan)):
            raise ConversionError(
                f"{self.work} was begun from other files or with other options; start again with --force"
            )
        return self.partial.is_dir()

    def finished(self) -> dict[int, Any]:
        """Results of the finished units by number."""
        found = {}
        for path in self.work.glob("unit-*.json"):
            # One that was cut off by a crash of the machine is not finished.
            with contextlib.suppress(ValueError):
                found[int(path.stem.removeprefix("unit-"))] = json.loads(path.read_text())
        return found

    def finish_unit(self, number: int, result: Any) -> None:
        """Called by the worker when the unit's bytes are on the disk."""
        write_durably(self.work / f"unit-{number}.json", json.dumps(result).encode())

    def commit(self) -> None:
        """OUT appears; what was there before goes."""
        for directory, _, _ in os.walk(self.partial):
            fsync_directory(Path(directory))
        faults.reached("rename")
        old = self.work / "old"
        if self.out.exists():
            os.replace(self.out, old)
        os.replace(self.partial, self.out)
        fsync_directory(self.out.parent)
        self.clean()

    @staticmethod
    def sync(paths: Iterable[Path]) -> None:
        """Files that were written without it reach the disk."""
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def clean(self) -> None:
        """Remove the work directory."""
        shutil.rmtree(self.work)
