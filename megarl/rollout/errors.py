"""Failures of the rollout side, as types; never `None` on a queue."""

from __future__ import annotations


class RolloutError(RuntimeError):
    """The pool cannot go on; the message names the part that failed and why."""


class ReplicaFailed(RolloutError):  # noqa: N818  (a fact, not an exception's name: "replica failed")
    """One replica died or refused to work; `replica` is its index."""

    def __init__(self, replica: int, message: str) -> None:
        super().__init__(message)
        self.replica = replica

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.replica, str(self))


class SupervisorFailed(RolloutError):  # noqa: N818
    """The supervisor did not start, or is gone."""
