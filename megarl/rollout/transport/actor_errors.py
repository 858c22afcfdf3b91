"""What the failure of a call to an actor says: the actor has died, it cannot be reached now, or the call has failed."""

from __future__ import annotations

from typing import Literal


def fate_of_actor(error: BaseException) -> Literal["died", "cut", "lives"]:
    """Return what has become of an actor whose call has raised `error`.

    `cut`: it may have got the call. Ray's classes are known by their names, so that processes need not import Ray.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"ActorUnavailableError"}:
        return "cut"
    return "died" if kinds & {"ActorDiedError", "RayActorError"} else "lives"


def own_text(error: BaseException) -> str:
    """Return the first line of the actor's own error, without the traceback in which Ray wraps it."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return lines[0] if lines else ""
