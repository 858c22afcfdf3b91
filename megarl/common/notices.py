"""Messages for the user's terminal from processes that have none: lines of RUN_DIR/logs/notices.jsonl.

A process of the pool writes a notice; the process that owns the terminal (trainer rank 0, or `megarl eval`) watches the
file and shows what is new. Nothing waits for either of them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 3000  # of one notice
_MAX_BYTES = 1 << 20  # that are read at a time


def notices_file(run_dir: Path) -> Path:
    """Return the file in which the notices of a run are."""
    return run_dir / "logs" / "notices.jsonl"


def write_notice(run_dir: Path, text: str) -> None:
    """Append a notice. A file that cannot be written costs that notice: it is in this process's log as well."""
    logger.warning("notice: %s", text)
    line = json.dumps({"text": text[:MAX_CHARACTERS]}) + "\n"
    try:
        with notices_file(run_dir).open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError as error:
        logger.warning("the notice could not be written: %s", error)


def printable(text: str) -> str:
    """Return the text without characters that would control a terminal: it may quote what a model has written."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)


class NoticeWatch:
    """Shows every notice that is written while it is open, by a daemon thread; `close` shows the last ones."""

    def __init__(self, run_dir: Path, show: Callable[[str], None], interval_s: float = 0.5) -> None:
        """`show` is called in that thread."""
        self._path, self._show, self._interval_s = notices_file(run_dir), show, interval_s
        self._position = _size(self._path)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what is left and end the thread. May be called again."""
        self._closed.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            for text in self._new():
                self._show(printable(text))
        except Exception:
            logger.exception("a notice could not be shown")  # the log has its text, and the next one may be shown

    def _new(self) -> list[str]:
        """Return the texts of the complete lines that have come since the last call."""
        size = _size(self._path)
        if size <= self._position:
            self._position = size
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            read = file.read(_MAX_BYTES)
        complete = read[: read.rfind(b"\n") + 1] or (read if len(read) == _MAX_BYTES else b"")
        self._position += len(complete)
        return [text for line in complete.splitlines() if (text := _text(line)) is not None]


def _text(line: bytes) -> str | None:
    """Return the text of a line; None if it is no notice."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    text = content.get("text") if isinstance(content, dict) else None
    return text[:MAX_CHARACTERS] if isinstance(text, str) else None


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
