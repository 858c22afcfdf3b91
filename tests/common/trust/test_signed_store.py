"""A store listens on the one address that it is given."""

import socket

import psutil
import pytest

from megarl.common.trust.signed_store import connect_store, serve_store


def listening() -> set[tuple[str, int]]:
    """The addresses and ports at which this process listens."""
    return {tuple(each.laddr) for each in psutil.Process().net_connections("inet") if each.status == "LISTEN"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_it_listens_on_one_address(host: str) -> None:
    before = listening()  # what earlier tests of this process have left may have the same port at another address
    store = serve_store(host, 0, 30.0)
    assert listening() - before == {(host, store.port)}
    connect_store(host, store.port, 30.0).set("key", "value")
    assert store.get("key") == b"value"
    port = store.port
    del store
    assert (host, port) not in listening(), "the socket is closed with its store"


def test_a_given_port_and_one_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            serve_store("127.0.0.1", port, 30.0)
    assert serve_store("127.0.0.1", port, 30.0).port == port


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_all_addresses_are_refused(host: str) -> None:
    with pytest.raises((ValueError, OSError), match=r"all addresses|not known|No address"):
        serve_store(host, 0, 30.0)
