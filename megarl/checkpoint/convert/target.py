"""An output directory that one rename publishes when it is complete, and that can be resumed until then.

Next to OUT, `.OUT.converting/` holds `output/` (which becomes OUT), `plan.json` (which describes the conversion) and a
file per finished unit. A conversion killed before the rename can be resumed; after it, a resume only removes leftovers.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megarl.checkpoint.format.manifest import fsync, write_durably
from megarl.common.errors import ConversionError


def from_os_error(error: OSError, doing: str) -> ConversionError:
    """Return a ConversionError with file and remedy for `error` (a full disk, a missing permission, …)."""
    file = error.filename2 or error.filename  # of two files, the second is written
    where = f"{doing}: {file}" if file and str(file) not in doing else doing
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return ConversionError(f"{what} ({where}); free space and continue with --resume")
    return ConversionError(f"{where}: {error.strerror or error}")


@contextmanager
def writing(path: Path, tensor: Callable[[], str] = str) -> Iterator[None]:
    """Convert OSErrors inside to ConversionErrors naming `path` and the current tensor, if any."""
    try:
        yield
    except OSError as error:
        at = f", at {name}" if (name := tensor()) else ""
        raise from_os_error(error, f"writing {path}{at}") from error


_PLAN, _LOCK = "plan.json", "lock"


class Output:
    """The output `out` and its work directory, used by one process and its forked workers at a time (`lock`)."""

    def __init__(self, out: Path) -> None:
        self.out = out.absolute()
        self.work = self.out.with_name(f".{self.out.name}.converting")
        self.partial = self.work / "output"
        self._lock: IO[bytes] | None = None
        self._force = False

    def refuse_overlap(self, source: Path) -> None:
        """Raise ConversionError if OUT is, contains or lies in the source: replacing OUT would delete source files."""
        root, out, work = source.resolve(), self.out.resolve(), self.work.resolve()
        # Also its entries, because links in the source may point elsewhere.
        inputs = [root, *(path.resolve() for path in (root.iterdir() if root.is_dir() else ()))]
        if root in out.parents or any(place in (path, *path.parents) for place in (out, work) for path in inputs):
            raise ConversionError(
                f"{self.out} and the source {source} overlap: neither may be, contain or lie in the other; "
                "choose a directory alongside the source"
            )

    def refuse_existing(self, *, force: bool, resume: bool) -> None:
        """Raise ConversionError if OUT or an unfinished conversion exists and no option covers it, or if `resume` has
        nothing to resume.
        """
        if self._occupied() and not force and not (resume and self.work.exists()):
            raise ConversionError(f"{self.out} exists already; choose another directory, or overwrite it with --force")
        if self.work.exists() and not (force or resume):
            raise ConversionError(
                f"{self.work} holds an unfinished conversion: continue it with --resume, or start again with --force"
            )
        if resume and not self.work.exists():
            raise ConversionError(f"there is nothing to resume: {self.work} does not exist")

    def lock(self) -> None:
        """Take the lock. Raises ConversionError if another process holds it."""
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = (self.work / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConversionError(
                f"another process is converting into {self.out}; wait until it ends, or end it"
            ) from None

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, plan: dict[str, object], *, force: bool = False) -> None:
        """Start again and remove all unfinished work. `force`: OUT may be replaced, even after a resume."""
        # Removed first, because a plan without its output means that the conversion is complete.
        (self.work / _PLAN).unlink(missing_ok=True)
        self._clear()
        self.partial.mkdir()
        self._force = force
        write_durably(self.work / _PLAN, json.dumps({"force": force, "plan": plan}).encode())

    def resume(self, plan: dict[str, object]) -> bool:
        """Check that the unfinished work has the same plan. Returns False if only leftovers must be removed.

        Raises ConversionError if the plan differs, or OUT has appeared and may not be replaced.
        """
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
        """Return the results of the finished units, JSON values, by number."""
        found = {}
        for path in self.work.glob("unit-*.json"):
            # A file truncated by a machine crash means an unfinished unit.
            with contextlib.suppress(ValueError):
                found[int(path.stem.removeprefix("unit-"))] = json.loads(path.read_text())
        return found

    def finish_unit(self, number: int, result: object) -> None:
        """Record the result of a unit, a JSON value. The unit's bytes must be on the disk."""
        write_durably(self.work / f"unit-{number}.json", json.dumps(result).encode())

    def commit(self) -> None:
        """Rename the output to OUT and delete an old OUT. Raises ConversionError if OUT may not be replaced."""
        for directory, _, _ in os.walk(self.partial):
            fsync(Path(directory))
        self._refuse_replacing()
        if self._occupied():
            os.replace(self.out, self._old)
        os.replace(self.partial, self.out)
        fsync(self.out.parent)
        self.clean()

    @property
    def _old(self) -> Path:
        return self.work / "old"

    def _occupied(self) -> bool:
        """Return whether OUT exists, even as a dangling symbolic link."""
        return os.path.lexists(self.out)

    def _refuse_replacing(self) -> None:
        """Raise ConversionError if OUT exists and may not be replaced.

        --force replaces, once, what OUT contained when the conversion began. Another program wrote later files; they
        are kept.
        """
        if self._occupied() and (not self._force or self._old.exists()):
            raise ConversionError(
                f"{self.out} has appeared since the conversion began; move it away and continue with --resume, or "
                "start again with --force to replace it"
            )

    def clean(self) -> None:
        """Remove the work directory. A resume completes an interrupted removal."""
        self._clear()
        # The plan marks a complete conversion; the rename removes it. A kill after the rename leaves two small files.
        done = self.work.with_name(f".{self.out.name}.converted")
        shutil.rmtree(done, ignore_errors=True)
        os.replace(self.work, done)
        shutil.rmtree(done)

    def _clear(self) -> None:
        for path in self.work.iterdir():
            if path.name not in (_LOCK, _PLAN):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
