"""A node's own address: the one by which the other nodes of the job reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil


def own_address(hosts: Sequence[str], interface: str | None = None) -> str:
    """Return this node's IPv4 address on `interface`, or on the route to the first of `hosts` that is another machine.

    Without another host or a network the address is 127.0.0.1. Raises ValueError if there is no such interface.
    """
    if interface is not None:
        return _of_interface(interface)
    # A host's own name may resolve to a loopback address, which no other node can use.
    outside = "192.0.2.1"  # reserved for documentation: only asks the routing table, nothing is sent
    for host in (*hosts, outside):
        address = _towards(host)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    return None


def _of_interface(name: str) -> str:
    for each in psutil.net_if_addrs().get(name, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    known = ", ".join(psutil.net_if_addrs())
    raise ValueError(f"launch.interface: this node has no {name!r} with an IPv4 address; it has: {known}")


def _towards(host: str) -> str | None:
    """Return the local address of the route to `host`; None if there is no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
