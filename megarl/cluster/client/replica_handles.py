"""The pool's replicas as the weight sync of the trainer calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.client.connection import ConnectionCut, call_once
from megarl.common.errors import EngineMayRun, PoolEnded, ReplicaFailed
from megarl.rollout.transport.rpc import as_rollout_error

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class ReplicaClient:
    """One replica as the weight sync calls it; thread-safe."""

    def __init__(
        self, index: int, actor: ActorHandle | None, log: Path, check: Callable[[], None], reach_s: float
    ) -> None:
        """`actor`: the replica's EngineReplica, None if it has ended; `log`: its log file, named in errors.

        `check` raises if the pool has ended. `reach_s`: how long a cut of the network is waited for.
        """
        self.index = index
        self.name = f"replica {index}"
        self._actor = actor
        self._log = log
        self._check = check
        self._reach_s = reach_s

    def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call one method of the replica and wait for its result, whose type is the method's.

        Raises ReplicaFailed, naming the replica, if it failed or died, and EngineMayRun if it could not be reached;
        TimeoutError after `timeout_s`, and PoolEnded.
        """
        import ray

        if self._actor is None:
            raise ReplicaFailed(self.index, f"{self.name} had ended when it was asked to {method}; see {self._log}")
        try:
            return call_once(
                self._actor, method, args, {}, timeout_s=timeout_s, reach_s=self._reach_s, check=self._check
            )
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.0f} s") from None
        except PoolEnded:
            raise
        except ConnectionCut as error:
            waited = f"could not be reached for {error.seconds:.0f} s, in which it was asked to {method}"
            raise EngineMayRun(self.index, f"{self.name} {waited}; see {self._log}: {error}") from error
        except Exception as error:
            raise as_rollout_error(self.index, method, error, f"see {self._log}") from error
