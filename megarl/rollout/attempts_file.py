"""RUN_DIR/attempts.json: how many groups were ever started, so that a resume can count those that were in vain.

A disk that is full for a time ends no run. What could not be written is written with the next groups that start; a run
that is killed before counts too few groups as rolled back when it resumes (`total/groups_rolled_back`), and nothing
else depends on the number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from megarl.common.files import write_json

logger = logging.getLogger(__name__)

ATTEMPTS_FILE = "attempts.json"


class AttemptsFile:
    """Reads and replaces the file; `notify` tells the user once that it cannot be written, and once that it is."""

    def __init__(self, run_dir: Path, notify: Callable[[str], object]) -> None:
        self._path, self._notify = run_dir / ATTEMPTS_FILE, notify
        self.waits = False  # True after a failure, until the number is in the file

    def read(self) -> int:
        """Return the number in the file; 0 if there is none, or if it cannot be read now."""
        try:
            return int(json.loads(self._path.read_text())["attempts"])
        except FileNotFoundError:
            return 0
        except OSError as error:
            self._notify(
                f"{self._path} cannot be read ({error}): groups that were started in vain since the newest checkpoint "
                "do not count as rolled back"
            )
            return 0

    def write(self, attempts: int) -> None:
        """Replace the number. If the disk does not take it, `waits` becomes true, and the next call tries again."""
        try:
            write_json(self._path, {"attempts": attempts})
        except OSError as error:
            if not self.waits:
                self._notify(
                    f"{self._path} could not be written ({error}); the run goes on and tries again. A resume before "
                    "that would count too few groups as rolled back"
                )
            self.waits = True
            return
        if self.waits:
            self._notify(f"{self._path} is written again")
        self.waits = False
