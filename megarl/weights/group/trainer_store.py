"""The store of the trainer's weight syncs: at which address rank 0 serves it, and how the other ranks find it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import Store

from megarl.common.trust.run_secret import run_secret
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema import Config
from megarl.weights.group.store import SyncStore, open_shared_store
from megarl.weights.plan.settings import SyncSettings

_serial = 0


def open_trainer_store(settings: SyncSettings, host: str | None, ranks: int) -> SyncStore:
    """Open the store of the syncs of `ranks` trainer ranks; each of them calls it.

    `host`: the address at which this rank, rank 0, serves it; None on the other ranks. Raises as `open_shared_store`
    does, and ValueError if several ranks have no run directory, whose secret authenticates them.
    """
    global _serial
    _serial += 1
    if ranks == 1:
        assert host is not None
        return SyncStore(host, 0, server=True)
    if settings.run_dir is None:
        raise ValueError("SyncSettings.run_dir is needed with several trainer ranks: its secret authenticates them")
    name = f"weights/{_serial}"
    return open_shared_store(name, run_secret(settings.run_dir), host, lambda text: _share(name, text, settings.rpc_s))


def _default_store() -> Store:
    """Return the trainer ranks' rendezvous store: it exists for any backend, and its waits have a timeout."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _share(name: str, text: str | None, wait_s: float) -> str:
    """Give rank 0's text to all trainer ranks over their rendezvous store, and return it."""
    rendezvous = _default_store()
    if text is not None:
        rendezvous.set(name, text)
        return text
    rendezvous.wait([name], timedelta(seconds=wait_s))
    return rendezvous.get(name).decode()


def store_address(config: Config) -> str:
    """Return the address at which this process serves a store: that of its node, as the node's agent has set it.

    Without an agent the run has one node, so it is 127.0.0.1, unless the engines are in a Ray cluster of the user's.
    """
    address = os.environ.get(NODE_ADDRESS_VARIABLE)
    if address is not None:
        return address
    return "127.0.0.1" if config.ray.address is None else reachable_address()


def reachable_address() -> str:
    """Return an address of this host that the engines can reach: Ray's, or 127.0.0.1 if Ray is not connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"
