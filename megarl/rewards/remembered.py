"""The memory of samples that timed out. Pure."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

CAPACITY = 4096


class RememberedTimeouts:
    """Remembers the digests of the latest `capacity` keys; looking one up makes it the latest."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._messages: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._messages)

    def add(self, key: str, message: str) -> None:
        """Remember a key and the message of its time-out."""
        self._messages[_digest(key)] = message
        self._messages.move_to_end(_digest(key))
        while len(self._messages) > self._capacity:
            self._messages.popitem(last=False)

    def get(self, key: str) -> str | None:
        """Return the message of a key; None if it is not remembered."""
        digest = _digest(key)
        if digest in self._messages:
            self._messages.move_to_end(digest)
        return self._messages.get(digest)


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
