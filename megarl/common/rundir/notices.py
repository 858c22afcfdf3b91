"""Messages for the user from processes without a terminal: lines of RUN_DIR/logs/notices.jsonl.

A process of the pool writes a notice; the process that owns the terminal (trainer rank 0, or `megarl eval`) watches the
file and shows what is new. Nothing waits for either of them. A full file is renamed to notices.1.jsonl, and the one
before it is deleted.
"""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from megarl.common.rundir.json_lines import JsonLines

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 3000  # of one notice
FULL_BYTES = 4 << 20  # of the file
_MOST_WAITING = 100  # notices that could not be written
_lock = threading.Lock()
_waiting: dict[Path, deque[bytes]] = {}


def notices_file(run_dir: Path) -> Path:
    """Return the file in which the notices of a run are."""
    return run_dir / "logs" / "notices.jsonl"


def older_notices_file(run_dir: Path) -> Path:
    """Return the file in which the notices before those are."""
    return run_dir / "logs" / "notices.1.jsonl"


def write_notice(run_dir: Path, text: str) -> None:
    """Append a notice, which is also in this process's log. If the disk is full, it is written before the next notice;
    of too many, the oldest are dropped.
    """
    logger.warning("notice: %s", text)
    line = json.dumps({"text": text[:MAX_CHARACTERS], "wall_time": round(time.time(), 3)}) + "\n"
    with _lock:
        lines = _waiting.setdefault(run_dir, deque(maxlen=_MOST_WAITING))
        lines.append(line.encode())
        try:
            _append(run_dir, lines)
            del _waiting[run_dir]
        except OSError as error:
            lines[0] = b"\n" + lines[0].lstrip()  # after its possibly written beginning
            logger.warning("the notice could not be written and is kept until the next one: %s", error)


def _append(run_dir: Path, lines: deque[bytes]) -> None:
    """Move lines to the file, a new one if the present one is full. Raises OSError if not all could be written.

    Two processes that find it full at the same time may delete the older notices early.
    """
    path = notices_file(run_dir)
    with suppress(FileNotFoundError):
        if path.stat().st_size >= FULL_BYTES:
            path.replace(older_notices_file(run_dir))
    with path.open("ab", buffering=0) as file:
        while lines:
            if file.write(lines[0]) < len(lines[0]):
                raise OSError(f"a line was written to {path} in part only")
            lines.popleft()


def printable(text: str) -> str:
    """Return the text without terminal control characters, because it may quote a model."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)


class _Notice(msgspec.Struct):
    text: str


class NoticeWatch:
    """Shows every notice that is written while it is open, by a daemon thread; `close` shows the last ones."""

    def __init__(self, run_dir: Path, show: Callable[[str], None], interval_s: float = 0.5) -> None:
        """`show` is called in that thread, or in another one by `show_new`."""
        self._path, self._show, self._interval_s = notices_file(run_dir), show, interval_s
        self._file: BinaryIO | None = None
        self._lines, self._decoder = JsonLines(), msgspec.json.Decoder(_Notice)
        with suppress(OSError):
            self._file = self._path.open("rb")
            self._lines.position = self._file.seek(0, os.SEEK_END)
        self._closed, self._looks = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watch-notices", daemon=True)
        self._thread.start()

    def show_new(self, within_s: float = 5.0) -> None:
        """Show all notices written so far. Returns within `within_s`, because the disk may hang."""
        look = threading.Thread(target=self._look, name="show-notices", daemon=True)
        look.start()
        look.join(within_s)

    def close(self) -> None:
        """Show the rest and end the thread. May be called again."""
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            with self._looks:
                self._show_lines()
        except Exception:
            logger.exception("a notice could not be shown")  # the log has its text, and the next one may be shown

    def _show_lines(self) -> None:
        """Show the complete lines that have come since the last call: of the file that was open, then of a new one."""
        while True:
            if self._file is None:
                try:
                    self._file, self._lines = self._path.open("rb"), JsonLines()
                except FileNotFoundError:
                    return
            for notice in self._lines.decoded(self._file, self._decoder):
                self._show(printable(notice.text[:MAX_CHARACTERS]))
            if not self._path.exists() or os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
            self._file.close()
            self._file = None
