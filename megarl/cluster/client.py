"""The trainer's side of the pool: synchronous calls with bounded waits. Used by rank 0; other leaders only connect."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.cluster.handle import SupervisorHandle, read_state, stop_supervisor, wait_ready
from megarl.cluster.ray_head import NODE_ADDRESS_VARIABLE, access_environment
from megarl.cluster.supervisor import CONTROLLER
from megarl.common.errors import ReplicaFailed, RolloutError
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.rollout.admission import Counters
from megarl.rollout.controller import BatchReady
from megarl.rollout.devices import HeldDevices
from megarl.rollout.pool import as_replica_failure
from megarl.rollout.replica import replica_name

logger = logging.getLogger(__name__)

# What a call may take beyond the bound that the controller itself keeps, so that its own message wins.
GRACE_S = 15.0


def connect_ray(handle: SupervisorHandle, timeout_s: float) -> None:
    """Connect this process, by address, to the raylet of its host. Idempotent; bounded by `timeout_s`."""
    os.environ.update(access_environment(Path(handle.run_dir)))
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", str(max(1, int(timeout_s))))
    import ray

    if ray.is_initialized():
        return
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if in_main else None
    try:
        ray.init(
            address=handle.address,
            namespace=handle.namespace,
            log_to_driver=False,
            configure_logging=False,
            # Set by the node's agent; None lets Ray take any raylet of this host.
            _node_ip_address=os.environ.get(NODE_ADDRESS_VARIABLE),
        )
    except Exception as error:
        raise RolloutError(f"process {os.getpid()} could not connect to Ray at {handle.address}: {error}") from error
    finally:
        if in_main:
            # Ray replaces the handler; torchrun ends ranks by SIGTERM.
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class ReplicaClient:
    """One replica as the weight sync sees it; thread-safe."""

    def __init__(self, index: int, actor: Any, log: Path) -> None:
        self.index = index
        self.name = f"replica {index}"
        self._actor = actor
        self._log = log

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Blocking. ReplicaFailed naming it if it failed or died, TimeoutError after `timeout_s`."""
        import ray

        reference = getattr(self._actor, method).remote(*args)
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.0f} s") from None
        except Exception as error:
            raise as_replica_failure(self.index, method, error, f"see {self._log}") from error


class PoolHandles:
    """The pool as the weight sync sees it: replicas by name, which can be replaced."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    def replicas(self) -> Sequence[ReplicaClient]:
        import ray

        handle = self._client.handle
        logs = Path(handle.run_dir) / "logs"
        return [
            ReplicaClient(i, ray.get_actor(replica_name(i), namespace=handle.namespace), logs / f"replica-{i}.log")
            for i in self._client.members()
        ]

    def restart(self, names: Sequence[str], timeout_s: float) -> None:
        """Replace the named replicas by fresh ones. RolloutError if one does not come up."""
        indices = [int(name.removeprefix("replica ")) for name in names]
        self._client.call("restart_replicas", indices, timeout_s=timeout_s)


class PoolClient:
    """Mirrors the controller's methods. Every call ends within its bound from `config.timeouts`."""

    def __init__(self, handle: SupervisorHandle, config: Config) -> None:
        self.handle = handle
        self.config = config
        self._controller: Any = None
        self._tokenizer: Any = None

    @classmethod
    def connect(cls, handle: SupervisorHandle, config: Config) -> PoolClient:
        """Wait until the pool is ready (engines started) and connect. SupervisorFailed naming what did not start."""
        wait_ready(handle, config.timeouts.engine_start_s + config.timeouts.ray_start_s)
        connect_ray(handle, config.timeouts.ray_start_s)
        import ray

        client = cls(handle, config)
        client._controller = ray.get_actor(CONTROLLER, namespace=handle.namespace)
        return client

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """One controller method. RolloutError with the controller's own cause, or saying that it did not answer."""
        import ray

        reference = getattr(self._controller, method).remote(*args, **kwargs)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                # In slices: an ended supervisor is noticed at once, not at the end of the bound.
                return ray.get(reference, timeout=min(2.0, max(0.0, deadline - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                self._check_supervisor()
                if time.monotonic() >= deadline:
                    raise RolloutError(
                        f"trainer rank 0 waited {timeout_s:.0f} s for the rollout controller to {method}"
                    ) from None
            except ray.exceptions.RayActorError as error:
                self._check_supervisor()
                raise RolloutError(f"the rollout controller died; see {self._logs / 'controller.log'}") from error
            except ray.exceptions.RayTaskError as error:
                raise _own_error(error) from error

    def _check_supervisor(self) -> None:
        state = read_state(Path(self.handle.run_dir)) or {}
        if self.handle.is_alive() and state.get("state") == "ready":
            return
        said = state.get("error")
        raise RolloutError(f"the rollout pool has ended: {said or 'its supervisor was killed'}; see {self._logs}")

    @property
    def _logs(self) -> Path:
        return Path(self.handle.run_dir) / "logs"

    def members(self) -> list[int]:
        """Indices of all replicas, lost and joining ones included."""
        return self.call("members", timeout_s=self.config.timeouts.rpc_s)

    def devices(self) -> list[HeldDevices]:
        """What every replica holds."""
        return self.call("devices", timeout_s=self.config.timeouts.rpc_s)

    def engine_handles(self) -> PoolHandles:
        """For the weight sync."""
        return PoolHandles(self)

    def set_version(self, version: int, admit: bool = True) -> Counters:
        """The engines serve `version`; with `admit` start what it allows."""
        return self.call("set_version", version, admit, timeout_s=self.config.timeouts.rpc_s)

    def admit(self) -> Counters:
        """Start every group that the version allows."""
        return self.call("admit", timeout_s=self.config.timeouts.rpc_s)

    def wait_batch(self, step: int, timeout_s: float | None = None) -> BatchReady:
        """The batch of `step` when all its groups are in the queue."""
        bound = timeout_s or self.config.timeouts.generate_s
        return self.call("wait_batch", step, bound, timeout_s=bound + GRACE_S)

    def commit(self, step: int, *, trained: int, filtered: int, dropped_stale: int, failed: int) -> Counters:
        """What became of every group of `step`."""
        return self.call(
            "commit", step, trained=trained, filtered=filtered, dropped_stale=dropped_stale, failed=failed,
            timeout_s=self.config.timeouts.rpc_s,
        )  # fmt: skip

    def counters(self) -> Counters:
        return self.call("counters", timeout_s=self.config.timeouts.rpc_s)

    def evaluate(self, version: int, label: str = "") -> list[SetReport]:
        """Every held-out set, greedy and sampled; with `label` also RUN_DIR/eval_{label}.jsonl."""
        return self.call("evaluate", version, label, timeout_s=self.config.timeouts.generate_s + GRACE_S)

    def references(self, group_ids: Sequence[int]) -> dict[int, str]:
        """Reference answers of groups."""
        return self.call("references", list(group_ids), timeout_s=self.config.timeouts.rpc_s)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens kept. In this process."""
        if self._tokenizer is None:
            from megarl.data.tokenize import load_tokenizer

            self._tokenizer = load_tokenizer(self.config.model.path)
        text: str = self._tokenizer.decode(list(ids))
        return text

    def state_dict(self) -> dict[str, Any]:
        return self.call("state_dict", timeout_s=self.config.timeouts.rpc_s)

    def begin(self, state: dict[str, Any] | None) -> Counters:
        """Go back to a committed history, or to its beginning; the first call of every trainer."""
        timeouts = self.config.timeouts
        return self.call("begin", state, timeout_s=timeouts.engine_start_s + 3 * timeouts.rpc_s)

    def close(self) -> None:
        """End the pool: supervisor, Ray, engines. Bounded by timeouts.shutdown_s."""
        import ray

        ray.shutdown()
        stop_supervisor(
            Path(self.handle.run_dir), self.handle.process, self.handle.launch_id, self.config.timeouts.shutdown_s,
            self.handle.host,
        )  # fmt: skip


def _own_error(error: Any) -> Exception:
    """The controller's own exception, if it is one of ours; Ray's otherwise."""
    cause = error.cause
    if isinstance(cause, ReplicaFailed):
        return ReplicaFailed(cause.replica, str(cause))
    if isinstance(cause, (RolloutError, ValueError, TimeoutError)):
        return type(cause)(str(cause))
    return RolloutError(f"the rollout controller failed: {type(cause).__name__}: {cause}")
