"""The errors that cross packages: a user's mistake, a failed conversion, a failed pool, a failed weight sync."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """One or several problems of a configuration; `problems` holds one line each, key first."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{head}{len(self.problems)} problems{lines}")


class ConversionError(ValueError):
    """A conversion cannot go on; the message names the file and the remedy."""


class RolloutError(RuntimeError):
    """The pool cannot go on; the message names the part that failed and why."""


class ReplicaFailed(RolloutError):  # noqa: N818  (a fact, not an exception's name: "replica failed")
    """One replica died or refused to work; `replica` is its index."""

    def __init__(self, replica: int, message: str) -> None:
        super().__init__(message)
        self.replica = replica

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.replica, str(self))


class NoReplicaLeft(ReplicaFailed):
    """The last replica that served has failed."""


class SupervisorFailed(RolloutError):  # noqa: N818
    """The supervisor did not start, or is gone."""


class WeightSyncError(RuntimeError):
    """A sync did not complete, and its version was published nowhere.

    Attributes:
        version: the version that was being published.
        failed_members: members or replicas that failed (never those that only lost their peer).
        needs_restart: replicas between start and finish; their weights are undefined and they must be restarted.
    """

    def __init__(
        self, message: str, *, version: int = -1, failed_members: Sequence[str] = (), needs_restart: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.version = version
        self.failed_members = tuple(failed_members)
        self.needs_restart = tuple(needs_restart)


class SyncAborted(WeightSyncError):  # noqa: N818 - a state of the group, raised in every member but the first
    """Another member failed first; this one was released from its wait."""


class PeerTimeout(WeightSyncError):  # noqa: N818
    """A wait reached its deadline; the message says who waited for whom."""


class ConnectionLost(WeightSyncError):  # noqa: N818
    """A peer closed its connection in mid-broadcast; somebody else failed, or will be named by the leader."""


class DigestMismatch(WeightSyncError):  # noqa: N818
    """A bucket is not what its sender sent; it was not loaded."""
