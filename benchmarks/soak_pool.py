"""Changes of a living run's pool by `megarl pool`, as a user makes them: drain, add, remove."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from whole_run import environment  # noqa: E402

COMMAND_S = 300.0  # for `megarl pool`, which waits for the start of an engine
SERVE_S = 300.0  # for an engine that joins with the next publication


@dataclass(frozen=True)
class PoolChange:
    """Changes the pool of the run in `run_dir`, and tells `note` what each command has answered.

    `goes_on()` waits until the run has made two more steps, False if it does not. `wait` is `WatchedRun.wait`.
    """

    run_dir: Path
    note: Callable[[str], object]
    goes_on: Callable[[], bool]
    wait: Callable[[Callable[[], bool], float], bool]

    def drain(self, number: int) -> bool:
        """Take a replica out of work for two steps, and back in; False if the run refuses or does not go on."""
        return all(self._ask("drain", str(number), *undo) and self.goes_on() for undo in ([], ["--undo"]))

    def add_for_a_while(self) -> bool:
        """Add a replica, let it serve for two steps, and remove it; False if one of that fails."""
        number = self._add()
        return number is not None and self.goes_on() and self._remove(number)

    def exchange(self, number: int) -> bool:
        """Remove a replica, and two steps later add another one; False if one of that fails."""
        return self._remove(number) and self._add() is not None and self.goes_on()

    def _add(self) -> int | None:
        """Return the number of a replica that was added and serves; None if it does not."""
        before = set(self.states())
        if not self._ask("add") or not (added := set(self.states()) - before):
            return None
        (number,) = added
        return number if self.wait(lambda: self.states().get(number) == "serving", SERVE_S) else None

    def _remove(self, number: int) -> bool:
        return self._ask("remove", str(number)) and self.goes_on() and number not in self.states()

    def states(self) -> dict[int, str]:
        """Return the state of each replica by its number; {} if the run does not say it."""
        told = self._run("list", "--json")
        if told.returncode:
            return {}
        return {each["replica"]: each["state"] for each in json.loads(told.stdout)["replicas"]}

    def _ask(self, action: str, *arguments: str) -> bool:
        told = self._run(action, *arguments)
        self.note((told.stdout or told.stderr).strip().splitlines()[-1])
        return told.returncode == 0

    def _run(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megarl", "pool", action, str(self.run_dir), *arguments]
        return subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
