"""Tells from the failure of a call to a replica's actor what has happened to the replica."""

from __future__ import annotations

from megarl.common.errors import ReplicaFailed, RequestFailed


def as_rollout_error(index: int, method: str, error: Exception, where: str) -> RequestFailed | ReplicaFailed:
    """Convert what an actor call raised: the replica's own error, which Ray wraps, or the death of the actor.

    `where`: where the replica's log is.
    """
    # Ray raises a subclass of the cause's type whose text is the replica's whole traceback: read the cause first.
    cause = getattr(error, "cause", None)
    for own in (cause, error):
        if isinstance(own, RequestFailed):
            return RequestFailed(str(own))
        if isinstance(own, ReplicaFailed):
            return ReplicaFailed(index, f"{own}; {where}")
    if "ActorDied" in type(error).__name__ or "ActorUnavailable" in type(error).__name__:
        return ReplicaFailed(index, f"replica {index} died while it was asked to {method}; {where}")
    detail = str(cause or error).strip().splitlines()
    return ReplicaFailed(
        index,
        f"replica {index} failed to {method}: {type(cause or error).__name__}: {detail[0] if detail else ''}; {where}",
    )
