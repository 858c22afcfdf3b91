"""The waits of the store."""

import threading

import pytest

from megarl.common.errors import PeerTimeout
from megarl.weights.group.store import SyncStore


@pytest.fixture
def server() -> SyncStore:
    return SyncStore("127.0.0.1", 0, server=True)


def test_a_wait_is_bounded_and_says_for_what(server: SyncStore) -> None:
    timer = threading.Timer(0.2, server.connection().put, ("late", {"a": 1}))
    timer.start()
    assert server.wait("late", 60.0, "the key") == {"a": 1}
    with pytest.raises(PeerTimeout, match=r"waited 0 s for the key"):
        server.wait("key", 0.45, "the key")


def test_blocking_waits_return_the_value_or_none_in_time(server: SyncStore) -> None:
    client = server.connection()
    timer = threading.Timer(0.2, server.put, ("late", [1, 2]))
    timer.start()
    assert client.block("late", 60.0) == [1, 2] and client.block_all(["late"], 60.0) == [[1, 2]]
    assert client.block("never", 0.1) is None and client.block_all(["late", "never"], 0.1) is None
    assert client.get("late") == [1, 2], "the connection works as before"
    assert client.put_once("late", 3) == [1, 2] and client.put_once("new", 3) == 3
