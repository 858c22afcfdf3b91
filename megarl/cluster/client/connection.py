"""The connection of a trainer's rank to the pool's Ray."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.cluster.pool.ray_head import PATIENCE, access_environment, loopback_kept
from megarl.common.errors import RolloutError
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE


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
    """Set this process's handler of SIGTERM again after the block.

    torchrun ends ranks by SIGTERM, and one that is about to report a failure must survive it. `ray.init` sets another
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
