"""The interface between a weight sync and the rollout pool: named replicas that can be called and restarted."""

from collections.abc import Sequence
from typing import Any, Protocol

ABANDON = {"abandon": True}  # the arguments of an engine's `update_weights` that give up a sync


class ReplicaHandle(Protocol):
    """One engine replica.

    Its methods are `world_size()`, `init_weight_transfer(init_info)`, `pause(clear_cache)`, `start_weight_update()`,
    `update_weights(update_info)`, `finish_weight_update(version)` (None: it stays the same), `resume()`,
    `abandon_weight_update(ABANDON)` after a sync that another member has interrupted, and `fail(reason)`. A replica
    that has abandoned a sync stays paused, and refuses to resume, until it has loaded all weights of a later one.

    Engines on the trainer's GPUs also have `shutdown()`, `sleep()`, and `wake(part)` with "weights" instead of a pause
    and "kv_cache" instead of `resume()`. The last two return the bytes that are then held.
    """

    @property
    def name(self) -> str:
        """The replica's name in errors, e.g. `replica 1`."""
        ...

    def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call a method by name and wait for its result, whose type depends on the method. Thread-safe.

        Raises:
            TimeoutError: no answer within `timeout_s` seconds.
            Exception: the exception of the method, or any other one if the replica is dead.
        """
        ...


class EngineHandles(Protocol):
    """The methods of the rollout pool that a weight sync uses. Only the leader has the pool."""

    def replicas(self) -> Sequence[ReplicaHandle]:
        """Return all replicas that take part in the next sync, in a fixed order."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of the replicas that take part in the next sync, in the order of `replicas`."""
        ...

    def restart(self, names: Sequence[str], timeout_s: float) -> None:
        """Replace the named replicas by new ones, and wait for these. `replicas()` returns the others as before.

        A replica without room, or one removed meanwhile, may be left out from then on. Raises an exception if they
        cannot be restarted; the run then ends with the error of the sync.
        """
        ...

    def replace_later(self, names: Sequence[str], timeout_s: float) -> None:
        """End the named replicas; new ones join with a later sync. `replicas()` returns the others as before.

        If none of the others serves training, this is `restart`, which takes up to `timeout_s` and raises as it does.
        """
        ...
