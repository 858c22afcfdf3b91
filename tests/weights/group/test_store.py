"""The wait of the store, on a clock of its own."""

from __future__ import annotations

import threading

import pytest

from megarl.common.errors import PeerTimeout
from megarl.weights.group import store as module
from megarl.weights.group.store import SyncStore


class Clock:
    """`time` of the module under test: sleeping moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def store_with(clock: Clock, appears: dict[str, float]) -> SyncStore:
    store = SyncStore("127.0.0.1", 0, server=True)
    store.get = lambda key: key if clock.now >= appears.get(key, 1e9) else None  # type: ignore[method-assign]
    return store


@pytest.mark.parametrize("appears_s", [0.0, 0.01, 0.07, 1.0, 60.0])
def test_a_wait_ends_soon_after_its_key_appears_and_asks_rarely(clock: Clock, appears_s: float) -> None:
    """A pause that doubled made every trainer rank but the first 44 ms late in each step's sync of 80 ms."""
    store = store_with(clock, {"key": appears_s})
    assert store.wait("key", 100.0, "the key") == "key"
    assert clock.now - appears_s <= 0.001 + 0.05 * appears_s
    assert clock.sleeps <= 150 + 10 * appears_s


def test_a_wait_is_bounded_and_says_for_what(clock: Clock) -> None:
    with pytest.raises(PeerTimeout, match=r"waited 3 s for the key"):
        store_with(clock, {}).wait("key", 3.0, "the key")
    assert 3.0 <= clock.now <= 3.2


def test_blocking_waits_return_the_value_or_none_in_time_and_every_message_is_counted() -> None:
    server = SyncStore("127.0.0.1", 0, server=True)
    client = server.connection()
    timer = threading.Timer(0.2, server.put, ("late", [1, 2]))
    timer.start()
    assert client.block("late", 60.0) == [1, 2] and client.block_all(["late"], 60.0) == [[1, 2]]
    assert client.block("never", 0.1) is None and client.block_all(["late", "never"], 0.1) is None
    assert client.get("late") == [1, 2], "the connection works as before"
    assert client.put_once("late", 3) == [1, 2] and client.put_once("new", 3) == 3
    assert client.requests == 2 + 3 + 2 + 3 + 3 + 2
