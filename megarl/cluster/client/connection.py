"""The connection of a trainer's rank to the pool's Ray, and calls over it.

Each call of an actor of the pool runs once. Waits are bounded, and survive short network cuts.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.cluster.pool.ray_head import PATIENCE, access_environment, loopback_kept
from megarl.common.errors import RolloutError
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.exceptions import ActorUnavailableError

logger = logging.getLogger(__name__)

SLICE_S = 2.0  # how often a wait checks whether the pool has ended
RETRY_S = 1.0  # between two attempts to reach an actor
PROBE_S = 10.0  # how often an open call tests its connection


def connect_ray(handle: SupervisorHandle, timeout_s: float) -> None:
    """Connect this process, by address, to the raylet of its host. Idempotent; bounded by `timeout_s`.

    Raises RolloutError if the connection fails.
    """
    os.environ.update(access_environment(Path(handle.run_dir)))
    os.environ.setdefault("RAY_py_gcs_connect_timeout_s", str(max(1, int(timeout_s))))
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return
    with own_sigterm_handler(), loopback_kept():
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
            message = f"process {os.getpid()} could not connect to Ray at {handle.address}: {error}"
            raise RolloutError(message) from error


@contextmanager
def own_sigterm_handler() -> Iterator[None]:
    """Restore this process's handler of SIGTERM after the block.

    torchrun ends ranks by SIGTERM. A rank that is about to report a failure must survive it. `ray.init` sets another
    handler, and `ray.shutdown` leaves none: ray 2.60.0 resets the signal in C++, which `signal.getsignal` cannot see.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class ConnectionCut(RolloutError):  # noqa: N818
    """An actor, not known to be dead, could not be reached within the bound of `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def call_once(
    actor: ActorHandle, method: str, args: Sequence[object], kwargs: dict[str, object], *, timeout_s: float,
    reach_s: float, check: Callable[[], None],
) -> Any:  # noqa: ANN401  # Ray does not know the type  # fmt: skip
    """Call a method of an actor that has `answer`, wait for its result, and retry after a cut of the connection.

    The method runs once, however often the call is sent. Raises GetTimeoutError after `timeout_s`, and ConnectionCut if
    the actor cannot be reached for `reach_s` or at the end of that time. Exceptions of `check` and of the call pass.
    """
    import ray

    key, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    while True:
        sent_at = time.monotonic()
        reference = actor.answer.remote(key, method, args, kwargs)
        try:
            return result_of(reference, max(0.0, deadline - sent_at), _Probes(actor, check))
        except ray.exceptions.ActorUnavailableError as error:
            check()
            now = time.monotonic()
            # A call that was under way for long had a connection, but nobody knows until when.
            lost_at = now if now - sent_at > reach_s / 2 else sent_at
            _reach(actor, error, lost_at, min(lost_at + reach_s, deadline), check)
            logger.warning("%s is sent again: %s", method, error)


class _Probes:
    """The `check` of an open call, which also sends a probe over its connection every PROBE_S.

    Ray 2.60.0's server gives up a connection after 10 to 30 s without a sign of life. A side that only waits does not
    notice: the reset is lost in the same cut, and gRPC's keepalive comes every 300 s. A probe is answered by a reset,
    and Ray then fails each call of the connection.
    """

    def __init__(self, actor: ActorHandle, check: Callable[[], None]) -> None:
        self._actor, self._check = actor, check
        self._sent_at = time.monotonic()
        self._probe: ObjectRef | None = None

    def __call__(self) -> None:
        self._check()
        if time.monotonic() - self._sent_at >= PROBE_S and not self._under_way():
            self._probe, self._sent_at = self._actor.__ray_ready__.remote(), time.monotonic()

    def _under_way(self) -> bool:
        import ray

        return self._probe is not None and not ray.wait([self._probe], timeout=0)[0]


def _reach(
    actor: ActorHandle, cut: ActorUnavailableError, lost_at: float, until: float, check: Callable[[], None]
) -> None:
    """Wait until an actor answers a probe. Raises ConnectionCut at the time `until`, and what `check` raises.

    A call does not show in time whether it arrived: it may run for long, and Ray may take minutes to report a lost
    connection. `cut`: the report of the present cut; `lost_at`: when the actor was last heard.
    """
    import ray

    while time.monotonic() + RETRY_S < until:
        time.sleep(RETRY_S)
        try:
            result_of(actor.__ray_ready__.remote(), max(0.0, until - time.monotonic()), check)
            return
        except ray.exceptions.GetTimeoutError:
            break
        except ray.exceptions.ActorUnavailableError as error:
            cut = error
            check()
    raise ConnectionCut(str(cut).strip().splitlines()[0], time.monotonic() - lost_at) from cut


def result_of(reference: ObjectRef, timeout_s: float, check: Callable[[], None]) -> Any:  # noqa: ANN401  # Ray does not know the type
    """Wait for a remote call's result in slices, so that `check` soon raises if the pool has ended.

    Raises GetTimeoutError after `timeout_s`. An exception of the call passes.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(reference, timeout=min(SLICE_S, max(0.0, deadline - time.monotonic())))
        except ray.exceptions.GetTimeoutError:
            check()
            if time.monotonic() >= deadline:
                raise
