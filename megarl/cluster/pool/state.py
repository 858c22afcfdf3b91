"""The state of a pool in RUN_DIR/supervisor.json, written by its supervisor for the launcher and the ranks."""

import logging
import platform
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.cluster.pool.pool_process import SupervisorSpec, read_state, write_state
from megarl.common.clocks import RateLimit
from megarl.common.process.processes import ProcessId, still_alive

logger = logging.getLogger(__name__)


class PoolState:
    """Writes the state, which the supervisor's main thread and its watch change.

    It leaves the file alone once the supervisor of another launch, whose run took the directory, has written there.
    """

    def __init__(
        self, spec: SupervisorSpec, private: Path, complaints: RateLimit, on_replaced: Callable[[str], None]
    ) -> None:
        """`private`: the pool's private directory; `on_replaced` gets the reason once if the file becomes another
        launch's."""
        self._spec, self._run_dir = spec, Path(spec.run_dir)
        self._complaints, self._on_replaced = complaints, on_replaced
        self._lock = threading.Lock()
        self._has_written = False
        self._replaced_by: str | None = None  # the launch that has taken the file
        self.children: set[ProcessId] = set()  # the descendants that were seen and live
        self.published = True  # False after a failure to write the state, until a later attempt succeeds
        self.content: dict[str, Any] = {
            "state": "starting",
            "error": None,
            "address": "",
            "namespace": spec.namespace,
            "partition": spec.partition,
            "rebuilds": 0,
            "attempt": spec.attempt,
            "launch_id": spec.launch_id,
            "process": asdict(ProcessId.own()),
            "host": platform.node(),
            "agent": asdict(spec.agent),
            "private_directory": str(private),
        }

    def publish(self, **changes: object) -> None:
        """Write the state, with `changes`, to its file. If the disk refuses it, `published` says so.

        The first time it replaces the state of an earlier launch. If another launch has replaced this one's since then,
        nothing is written any more.
        """
        with self._lock:
            self.content.update(changes)
            self.content["children"] = [asdict(child) for child in still_alive(self.children)]
            try:
                if not self._is_replaced():
                    write_state(self._run_dir, self.content)
                    self._has_written = True
                self.published = True
            except OSError as error:
                self.published = False
                if self._complaints.allows():
                    logger.error("the state could not be written, and will be tried again: %s", error)

    def _is_replaced(self) -> bool:
        """Return whether the file is another launch's by now. Raises OSError."""
        if self._has_written and self._replaced_by is None:
            launch = (read_state(self._run_dir) or {}).get("launch_id", self._spec.launch_id)
            if launch != self._spec.launch_id:
                self._replaced_by = launch
                self._on_replaced(f"another launch ({launch}) has begun in {self._run_dir}")
        return self._replaced_by is not None

    def record_children(self, present: set[ProcessId]) -> set[ProcessId]:
        """Add `present` to the children seen before that live, orphans included; return a copy of these."""
        with self._lock:
            self.children = still_alive(self.children | present)
            return set(self.children)
