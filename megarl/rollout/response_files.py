"""The files of an evaluation's responses, RUN_DIR/eval_LABEL.jsonl, which a disk that is full for a time only delays.

A file appears as a whole. What the disk does not take waits in memory, as JSON lines, and is tried again until it is
written or the pool ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

RETRY_S = 2.0
WAITING_BYTES = 64 << 20  # of lines in memory; a file that is too much is lost, and reported


class ResponseFiles:
    """Writes the files; `notify` tells the user of each that waits, that is written after all, and that is lost."""

    def __init__(self, notify: Callable[[str], object]) -> None:
        self._notify = notify
        self._lock = threading.Lock()  # the methods are called from several threads
        self._waiting: dict[Path, bytes] = {}

    @property
    def waits(self) -> bool:
        """True while there is a file that the disk has not taken."""
        return bool(self._waiting)

    def write(self, path: Path, lines: Callable[[], Iterable[str]]) -> None:
        """Write a file of `lines()`, each without its line break; if that fails, keep them for `write_waiting`."""
        with self._lock:
            self._waiting.pop(path, None)  # of an evaluation with this label that was made before
            try:
                _replace(path, map(_encoded, lines()))
            except OSError as error:
                self._keep(path, b"".join(map(_encoded, lines())), error)

    def write_waiting(self) -> None:
        """Try to write what waits."""
        with self._lock:
            for path, content in list(self._waiting.items()):
                try:
                    _replace(path, [content])
                except OSError as error:
                    logger.warning("%s can still not be written: %s", path, error)
                    return
                del self._waiting[path]
                self._notify(f"{path} could not be written at first, and is complete now")

    async def keep_trying(self) -> None:
        """Try again at intervals; return when nothing waits any more."""
        while self.waits:
            await asyncio.sleep(RETRY_S)
            await asyncio.to_thread(self.write_waiting)

    def close(self) -> None:
        """Try for the last time; what is not written then is lost, and reported."""
        self.write_waiting()
        for path in self._waiting:
            self._notify(f"{path} is lost: the disk has not taken it before the pool ended")

    def _keep(self, path: Path, content: bytes, error: OSError) -> None:
        if len(content) + sum(map(len, self._waiting.values())) > WAITING_BYTES:
            self._notify(f"{path} is lost: it could not be written ({error}), and is too large to wait in memory")
            return
        self._waiting[path] = content
        self._notify(f"{path} could not be written ({error}); the run goes on and tries again")


def _encoded(line: str) -> bytes:
    return line.encode("utf-8", "replace") + b"\n"  # data may have what UTF-8 cannot represent


def _replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file as a whole. Raises OSError; then nothing is left of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
