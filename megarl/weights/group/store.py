"""The store of a weight sync: a TCPStore that trainer rank 0 serves. All values are JSON, signed with the store's key.
Anyone who reaches the store's port can read and replace values, but cannot sign them. The processes of the run get the
key from rank 0: engine workers in a call through Ray, trainer ranks from the secret of the run.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from megarl.common.errors import PeerTimeout
from megarl.common.trust.run_secret import derived_key, run_secret
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE, connect_store, serve_store, sign, verify
from megarl.common.values import JsonValue
from megarl.config.schema.job import RayConfig
from megarl.weights.plan.settings import SyncSettings

STORE_TIMEOUT_S = 30.0  # of one store request; the store answers immediately unless its owner has ended
_POLL_S = 0.1
_serial = 0


class SyncStore:
    """One process's connection to the store. Only `wait` and the `block` methods wait for keys.

    A connection serves one request at a time, so a thread that blocks needs its own (`connection`). Every method that
    reads a value raises NotAuthentic if no holder of the key has written it under this name.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes | None = None,
        *,
        server: bool = False,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        """Connect to a store or, with `server`, serve one at the address `host` alone.

        `key`: that of the store; a server without one makes its own.
        """
        if not key:
            if not server:
                raise ValueError(f"the store at {host}:{port} cannot be used without its key")
            key = secrets.token_bytes(32)
        self.host, self.key = host, key
        self._timeout = timedelta(seconds=timeout_s)
        self._store = (serve_store if server else connect_store)(host, port, timeout_s)
        self.port = self._store.port

    def connection(self) -> SyncStore:
        """Open another connection to the same server."""
        return SyncStore(self.host, self.port, self.key)

    def prefixed(self, prefix: str) -> PrefixStore:
        """Return a torch store over the keys with this prefix. Its values are those of torch, and are not signed."""
        return PrefixStore(prefix, self._store)

    def _signed(self, key: str, value: object) -> str:
        return sign(self.key, key, json.dumps(value))

    def _verified(self, key: str, value: bytes) -> JsonValue:
        return json.loads(verify(self.key, key, value))

    def put(self, key: str, value: object) -> None:
        """Set a key to a value that JSON can represent."""
        self._store.set(key, self._signed(key, value))

    def put_once(self, key: str, value: object) -> JsonValue:
        """Atomically set a key unless it is set. Return its JSON value afterwards."""
        return self._verified(key, self._store.compare_set(key, "", self._signed(key, value)))

    def get(self, key: str) -> JsonValue | None:
        """Return the JSON value of a key, or None if the key is not set."""
        if not self.has([key]):
            return None
        return self._verified(key, self._store.get(key))

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._store.check(list(keys)))

    def drop(self, key: str) -> None:
        """Delete a key."""
        self._store.delete_key(key)

    def block(self, key: str, timeout_s: float) -> JsonValue | None:
        """Return the JSON value of a key, or None if it is not set within `timeout_s` seconds.

        The server answers when the key is set: nothing is polled. Raises RuntimeError if the connection is lost.
        """
        self._store.set_timeout(timedelta(seconds=max(0.001, timeout_s)))
        try:
            return self._verified(key, self._store.get(key))
        except DistStoreError:
            return None
        finally:
            self._store.set_timeout(self._timeout)

    def block_all(self, keys: Sequence[str], timeout_s: float) -> list[JsonValue] | None:
        """Return the JSON values of all keys, or None if one of them is not set within `timeout_s` seconds."""
        try:
            self._store.wait(list(keys), timedelta(seconds=max(0.001, timeout_s)))
        except DistStoreError:
            return None
        return [self._verified(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def wait(self, key: str, timeout_s: float, what: str) -> JsonValue:
        """Poll until `key` is set, and return its JSON value. `what`: names the awaited thing in the error.

        Unlike in the `block` methods, handlers of signals run meanwhile, and other threads use the connection: torch
        serves one request of a connection after the other. Raises PeerTimeout if the key is not set within `timeout_s`
        seconds.
        """
        began = now = time.monotonic()
        while (value := self.get(key)) is None:
            if now > began + timeout_s:
                raise PeerTimeout(f"waited {timeout_s:.0f} s for {what}")
            # The pause grows with the time waited: a delay of a few percent, and few requests from many ranks.
            time.sleep(min(max(0.001, 0.04 * (now - began)), _POLL_S))
            now = time.monotonic()
        return value


def open_shared_store(name: str, secret: bytes, host: str | None, share: Callable[[str | None], str]) -> SyncStore:
    """Open a store that one rank serves for the others; every rank calls it.

    `secret`: that of the run. `host`: the address at which this rank serves the store, None on the other ranks.
    `share`: gives the server's text to all ranks. The text is signed and holds no key, so it may be public.

    Raises NotAuthentic if the text is not from a rank of this run, and ConnectionError on the other ranks if the store
    cannot be served.
    """
    if host is None:
        host, port, nonce = json.loads(verify(secret, name, share(None)))
        if host is None:
            raise ConnectionError(f"the store {name!r} could not be served: {nonce}")
        return SyncStore(host, port, derived_key(secret, f"{name} {nonce}"))
    # A key for this store only: values of the run's other stores are not accepted here.
    nonce = secrets.token_hex(16)
    try:
        store = SyncStore(host, 0, derived_key(secret, f"{name} {nonce}"), server=True)
    except Exception as error:
        share(sign(secret, name, json.dumps([None, 0, f"{type(error).__name__}: {error}"])))
        raise
    share(sign(secret, name, json.dumps([store.host, store.port, nonce])))
    return store


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


def _share(name: str, text: str | None, wait_s: float) -> str:
    """Share rank 0's text with all trainer ranks over their rendezvous store, which any backend has, and return it."""
    from torch.distributed.distributed_c10d import _get_default_store

    rendezvous: Store = _get_default_store()
    if text is not None:
        rendezvous.set(name, text)
        return text
    rendezvous.wait([name], timedelta(seconds=wait_s))
    return rendezvous.get(name).decode()


def store_address(ray: RayConfig) -> str:
    """Return the address at which this process serves a store: that of its node, as the node's launcher has set it.

    Without one the run has one node, so it is 127.0.0.1, unless the engines are in a Ray cluster of the user's.
    """
    address = os.environ.get(NODE_ADDRESS_VARIABLE)
    if address is not None:
        return address
    return "127.0.0.1" if ray.address is None else reachable_address()


def reachable_address() -> str:
    """Return an address of this host that the engines can reach: Ray's, or 127.0.0.1 if Ray is not connected."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    return "127.0.0.1"
