"""The ways in which engine workers load the weights (in place, or why not); the leader logs them when they change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class LoadingWays:
    """The way in which each worker has loaded last."""

    def __init__(self) -> None:
        self._ways: dict[str, str] = {}

    def note(self, version: int, reports: Sequence[dict[str, Any]]) -> None:
        """Log in which ways the engines load, if that of a worker differs from its last one.

        `reports`: those of all workers on the sync of `version`.
        """
        before, self._ways = self._ways, {each["member"]: each["loaded"] for each in reports}
        if self._ways != before:
            logger.info("weights of version %d: %s", version, _by_way(self._ways))


def _by_way(ways: Mapping[str, str]) -> str:
    """Return which engine workers load in which way as text, `ways` by worker."""
    workers: dict[str, list[str]] = {}
    for member, way in ways.items():
        workers.setdefault(way, []).append(member)
    if len(workers) == 1:
        return f"{next(iter(workers))} (all {len(ways)} engine workers)"
    return "; ".join(f"{way} ({', '.join(names)})" for way, names in workers.items())
