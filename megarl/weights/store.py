"""The store of a weight sync: a TCPStore that trainer rank 0 serves, and in which all values are JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, TCPStore

from megarl.common.errors import PeerTimeout
from megarl.common.json_values import JsonValue

STORE_TIMEOUT_S = 30.0  # of one store request; the store answers immediately unless its owner has ended
_POLL_S = 0.1


class SyncStore:
    """One process's connection to the store. Only `wait` and the `block` methods wait for keys.

    A connection serves one request at a time: a thread that blocks needs a connection of its own (`connection`).
    `requests` counts the messages to the server.
    """

    def __init__(self, host: str, port: int, *, server: bool = False, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, is_master=server, wait_for_workers=False, timeout=self._timeout)
        self.port = self._store.port
        self.requests = 0

    def connection(self) -> SyncStore:
        """Open another connection to the same server."""
        return SyncStore(self.host, self.port)

    def prefixed(self, prefix: str) -> PrefixStore:
        """Return a torch store over the keys with this prefix."""
        return PrefixStore(prefix, self._store)

    def put(self, key: str, value: object) -> None:
        """Set a key to a value that JSON can represent."""
        self.requests += 1
        self._store.set(key, json.dumps(value))

    def put_once(self, key: str, value: object) -> JsonValue:
        """Set a key unless it is set already, atomically. Return the JSON value that it then has."""
        self.requests += 1
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def get(self, key: str) -> JsonValue | None:
        """Return the JSON value of a key, or None if the key is not set."""
        if not self.has([key]):
            return None
        self.requests += 2  # torch waits for the key before it reads it
        return json.loads(self._store.get(key))

    def has(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are set."""
        self.requests += 1
        return bool(self._store.check(list(keys)))

    def drop(self, key: str) -> None:
        """Delete a key."""
        self.requests += 1
        self._store.delete_key(key)

    def block(self, key: str, timeout_s: float) -> JsonValue | None:
        """Return the JSON value of a key, or None if it is not set within `timeout_s` seconds.

        The server answers when the key is set: nothing is polled. Raises RuntimeError if the connection is lost.
        """
        self.requests += 2
        self._store.set_timeout(timedelta(seconds=max(0.001, timeout_s)))
        try:
            return json.loads(self._store.get(key))
        except DistStoreError:
            return None
        finally:
            self._store.set_timeout(self._timeout)

    def block_all(self, keys: Sequence[str], timeout_s: float) -> list[JsonValue] | None:
        """Return the JSON values of all keys, or None if one of them is not set within `timeout_s` seconds."""
        self.requests += 3
        try:
            self._store.wait(list(keys), timedelta(seconds=max(0.001, timeout_s)))
        except DistStoreError:
            return None
        return [json.loads(value) for value in self._store.multi_get(list(keys))]

    def wait(self, key: str, timeout_s: float, what: str) -> JsonValue:
        """Poll until `key` is set, and return its JSON value. `what`: what is waited for, for the error.

        Signal handlers of Python run meanwhile, which they do not in the `block` methods. Raises PeerTimeout if the key
        is not set within `timeout_s` seconds.
        """
        began = now = time.monotonic()
        while (value := self.get(key)) is None:
            if now > began + timeout_s:
                raise PeerTimeout(f"waited {timeout_s:.0f} s for {what}")
            # The pause grows with the time waited: a delay of a few percent, and few requests from many ranks.
            time.sleep(min(max(0.001, 0.04 * (now - began)), _POLL_S))
            now = time.monotonic()
        return value
