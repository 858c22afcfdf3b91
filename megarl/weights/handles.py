"""What a sync needs of the rollout pool: named replicas whose methods can be called, and restarted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ReplicaHandle(Protocol):
    """One engine replica. Methods called on it: `world_size()`, `init_weight_transfer(init_info)`,
    `pause(clear_cache)`, `start_weight_update()`, `update_weights(update_info)`,
    `finish_weight_update(version)` and `resume()`.
    """

    @property
    def name(self) -> str:
        """As it appears in errors, e.g. `replica 1`."""
        ...

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Blocking; thread-safe. Raises what the method raised, or when the replica is dead, or TimeoutError."""
        ...


class EngineHandles(Protocol):
    """The pool, as far as the weights are concerned. Only the leader has one."""

    def replicas(self) -> Sequence[ReplicaHandle]: ...

    def restart(self, names: Sequence[str], timeout_s: float) -> None:
        """Replace the named replicas by fresh ones; afterwards `replicas()` gives as many as before.

        Raises if they cannot be restarted: the run then ends with the sync's error.
        """
        ...


class RayReplicaHandle:
    """A Ray actor whose methods are those of `ReplicaHandle`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        import ray

        reference = getattr(self._actor, method).remote(*args)
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.0f} s") from error
