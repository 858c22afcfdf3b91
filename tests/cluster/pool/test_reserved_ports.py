"""A reserved port is given to nobody who asks for any port, and taken by the server that it is meant for."""

import socket
from pathlib import Path

import pytest

from megarl.cluster.pool.ray_head import ReservedPorts


def listener(port: int, *, reuse: bool = True, host: str = "127.0.0.1") -> socket.socket:
    server = socket.socket()
    if reuse:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_a_server_that_knows_its_port_gets_it() -> None:
    with ReservedPorts(2) as reserved:
        assert len(set(reserved.ports)) == 2
        for port in reserved.ports:
            with listener(port) as server, socket.create_connection(server.getsockname(), timeout=10) as client:
                assert client.getpeername()[1] == port


@pytest.mark.parametrize("reuse", [False, True])
def test_no_other_socket_is_given_the_port(reuse: bool) -> None:
    """The kernel is asked for as many ports as it would need to come back to the reserved ones by chance."""
    low, high = (int(each) for each in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with ReservedPorts(50) as reserved:
        given = set()
        for _ in range(min(3000, (high - low) // 4)):
            other = socket.socket()
            if reuse:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            given.add(other.getsockname()[1])
            other.close()
        assert len(given) > 50 and not given & set(reserved.ports)
