"""The decision to stop early, which all trainer ranks make together between two steps."""

from __future__ import annotations

from pathlib import Path

from megarl.common.rundir.run_files import stop_reason
from megarl.common.trust.object_collectives import TEXT
from megarl.run.loop.stop import StopSignals
from megarl.run.ranks.control_group import Peers


class StopVote:
    """Combines the stop requests: RUN_DIR/stop, which rank 0 looks for, and a stop signal to any rank."""

    def __init__(self, run_dir: Path, peers: Peers, signals: StopSignals) -> None:
        self._run_dir, self._peers, self._signals = run_dir, peers, signals
        self._request: str | None = None  # what rank 0 has read last in the file

    def install(self) -> None:
        """Treat a signal as a request. Call it in the main thread, after `ray.init`, which sets its own handler."""
        self._signals.run_has_begun()

    def asked(self) -> bool:
        """Tell whether this rank knows of a request. Not collective."""
        self._request = stop_reason(self._run_dir) if self._peers.is_first else None
        return self._signals.raised or self._request is not None

    def agree(self) -> str | None:
        """Return why the run was asked to stop, the same on every rank; None if it was not. Collective."""
        if not self._peers.any(self.asked()):
            return None
        return self._peers.on_first_rank(lambda: self._request or self._signals.name or "a stop signal", TEXT)
