"""The decision to stop early, which all trainer ranks make together between two steps."""

from __future__ import annotations

from pathlib import Path

from megarl.common.object_collectives import TEXT
from megarl.common.run_files import TerminationFlag, stop_reason
from megarl.run.peers import Peers


class StopVote:
    """Combines the stop requests: RUN_DIR/stop, which rank 0 looks for, and a SIGTERM to any rank."""

    def __init__(self, run_dir: Path, peers: Peers) -> None:
        self._run_dir, self._peers = run_dir, peers
        self._termination = TerminationFlag()

    def install(self) -> None:
        """Treat SIGTERM as a stop request. Call it in the main thread, after `ray.init`, which sets its own handler."""
        self._termination.install()

    def agree(self) -> str | None:
        """Return why the run was asked to stop, the same on every rank; None if it was not. Collective."""
        asked = self._termination.raised or (self._peers.is_first and stop_reason(self._run_dir) is not None)
        if not self._peers.any(asked):
            return None
        return self._peers.on_first_rank(lambda: stop_reason(self._run_dir) or "SIGTERM", TEXT)
