"""The one error of a weight sync: who failed, who must be restarted, and in which phase."""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(RuntimeError):
    """A sync did not complete, and its version was published nowhere.

    Attributes:
        version: the version that was being published.
        culprits: members or replicas that failed (never those that only lost their peer).
        caught: replicas between start and finish; their weights are undefined and they must be restarted.
    """

    def __init__(
        self, message: str, *, version: int = -1, culprits: Sequence[str] = (), caught: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.version = version
        self.culprits = tuple(culprits)
        self.caught = tuple(caught)


class SyncAborted(WeightSyncError):  # noqa: N818 - a state of the group, raised in every member but the first
    """Another member failed first; this one was released from its wait."""


class PeerTimeout(WeightSyncError):  # noqa: N818
    """A wait reached its deadline; the message says who waited for whom."""


class ConnectionLost(WeightSyncError):  # noqa: N818
    """A peer closed its connection in mid-broadcast; somebody else failed, or will be named by the leader."""


class DigestMismatch(WeightSyncError):  # noqa: N818
    """A bucket is not what its sender sent; it was not loaded."""
