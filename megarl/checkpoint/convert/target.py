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

from megarl.checkpoint.format import faults
from megarl.checkpoint.format.manifest import fsync_directory, write_durably
from megarl.common.errors import ConversionError

_PLAN, _LOCK = "plan.json", "lock"


class Output:
    """`out` and the work on it. Only one process at a time may hold it (`lock`); forked workers share the lock."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.work = self.out.with_name(f".{self.out.name}.converting")
        self.partial = self.work / "output"
        self._lock: IO[bytes] | None = None
        self._force = False

    def refuse_overlap(self, source: Path) -> None:
        """ConversionError if OUT is the source, holds a file of it or lies in it: to replace it would delete these."""
        root, out, work = source.resolve(), self.out.resolve(), self.work.resolve()
        # The entries too: what is linked into the source may lie elsewhere.
        inputs = [root, *(path.resolve() for path in (root.iterdir() if root.is_dir() else ()))]
        if root in out.parents or any(place in (path, *path.parents) for place in (out, work) for path in inputs):
            raise ConversionError(
                f"{self.out} and the source {source} overlap: the one must not be, hold or lie in the other; "
                "choose a directory beside it"
            )

    def refuse_existing(self, *, force: bool, resume: bool) -> None:
        """ConversionError if OUT exists, or an unfinished conversion does, and no option says what to do with it."""
        if self._occupied() and not force and not (resume and self.work.exists()):
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
        self._lock = (self.work / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConversionError(f"another process is converting into {self.out}; wait for it or end it") from None

    def release(self) -> None:
        """Let go of the lock, if it is held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, plan: dict[str, Any], *, force: bool = False) -> None:
        """Start afresh: forget whatever is there. `force`: what OUT is may be replaced, after a resume too."""
        # First: a plan without its output means that this is complete already.
        (self.work / _PLAN).unlink(missing_ok=True)
        self._clear()
        self.partial.mkdir()
        self._force = force
        write_durably(self.work / _PLAN, json.dumps({"force": force, "plan": plan}).encode())

    def resume(self, plan: dict[str, Any]) -> bool:
        """Check that the unfinished work is of the same plan. False if it is complete but for its leftovers."""
        path = self.work / _PLAN
        if not path.is_file():
            if any(self.partial.glob("*")) or self._occupied():
                raise ConversionError(f"{self.work} has no {_PLAN}; start again with --force")
            self.begin(plan)
            return True
        begun = json.loads(path.read_text())
        if begun.get("plan") != json.loads(json.dumps(plan)):
            raise ConversionError(
                f"{self.work} was begun from other files or with other options; start again with --force"
            )
        self._force = begun["force"]
        unfinished = self.partial.is_dir()
        if unfinished:
            self._refuse_replacing()
        return unfinished

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
        """OUT appears; what was there before goes. ConversionError if that may not be replaced."""
        for directory, _, _ in os.walk(self.partial):
            fsync_directory(Path(directory))
        faults.reached("rename")
        self._refuse_replacing()
        if self._occupied():
            os.replace(self.out, self._old)
        os.replace(self.partial, self.out)
        fsync_directory(self.out.parent)
        self.clean()

    @property
    def _old(self) -> Path:
        return self.work / "old"

    def _occupied(self) -> bool:
        """Whether OUT is anything, a dangling symbolic link included."""
        return os.path.lexists(self.out)

    def _refuse_replacing(self) -> None:
        """With --force what OUT was at the beginning goes, once; what appeared since then is somebody's."""
        if self._occupied() and (not self._force or self._old.exists()):
            raise ConversionError(
                f"{self.out} has appeared since the conversion began; move it away and go on with --resume, or start "
                "again with --force to replace it"
            )

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
        """Remove the work directory; killed meanwhile, a resume goes on with that."""
        self._clear()
        # What still says that this was complete goes by one rename; killed behind it, two small files are left.
        done = self.work.with_name(f".{self.out.name}.converted")
        shutil.rmtree(done, ignore_errors=True)
        os.replace(self.work, done)
        shutil.rmtree(done)

    def _clear(self) -> None:
        for path in self.work.iterdir():
            if path.name not in (_LOCK, _PLAN):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
