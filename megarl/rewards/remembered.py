"""The memory of samples that timed out. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

CAPACITY = 4096
TIMEOUTS = 2  # before a key is answered from the memory: the first may be a stall of the machine


@dataclass
class _Entry:
    """The time-outs of one key: the latest message, how many there were, and when the latest one that counts was."""

    message: str
    count: int
    ended: float


class RememberedTimeouts:
    """Remembers the digests of the latest `capacity` keys; looking one up makes it the latest.

    Only a key that has timed out twice is answered. Time-outs that overlap count as one, because one stall of the
    machine may have caused all of them; and a result makes the time-outs before it count no more.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of keys that have timed out, once or more often."""
        return len(self._entries)

    def add(self, key: str, message: str, began: float, ended: float) -> None:
        """Count a time-out of a key, between two times, and keep its message."""
        entry = self._entries.setdefault(_digest(key), _Entry(message, 0, began))
        entry.message = message
        if began >= entry.ended:
            entry.count, entry.ended = entry.count + 1, ended
        self._entries.move_to_end(_digest(key))
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def get(self, key: str) -> str | None:
        """Return the message of a key; None if it has not timed out twice."""
        digest = _digest(key)
        entry = self._entries.get(digest)
        if entry is None or entry.count < TIMEOUTS:
            return None
        self._entries.move_to_end(digest)
        return entry.message

    def forget(self, key: str) -> None:
        """Forget the time-outs of a key, because it has had a result."""
        self._entries.pop(_digest(key), None)


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
