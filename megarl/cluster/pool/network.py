"""A node's address for the other nodes of the job, and settings that keep a single node on loopback."""

import ipaddress
import os
import socket
from collections.abc import Sequence

import psutil

from megarl.cluster.pool.ray_head import LOOPBACK
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema.job import RayConfig


def own_address(hosts: Sequence[str], interface: str | None = None) -> str:
    """Return this node's IPv4 address on `interface`, or on the route to the first of `hosts` that is another machine.

    Without another host or a network the address is 127.0.0.1. Raises ValueError if there is no such interface, or if
    the other hosts cannot be reached by IPv4.
    """
    if interface is not None:
        return _of_interface(interface)
    # A host's own name may resolve to a loopback address, which no other node can use.
    outside = "192.0.2.1"  # reserved for documentation: only asks the routing table, nothing is sent
    for host in (*hosts, outside):
        address = _towards(host)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    if any(_is_ipv6_only(host) for host in hosts):
        raise ValueError(
            f"there is no IPv4 route to the other nodes ({', '.join(hosts)}); megarl's nodes talk over IPv4: set "
            "launch.interface to an interface with an IPv4 address"
        )
    return "127.0.0.1"


def _is_ipv6_only(host: str) -> bool:
    """Return whether a host has addresses, none of which is IPv4."""
    try:
        families = {family for family, *_ in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return families == {socket.AF_INET6} and host not in ("::1", "localhost")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == address for each in addresses):
            return name
    return None


def one_node_environment(ray: RayConfig) -> dict[str, str]:
    """Return `network_environment` on loopback for a run that no agent has started, which has one node only.

    Without what the user has set; empty if an agent has set it, or if the engines are in a Ray cluster of the user's.
    Raises ValueError if torchrun has started ranks on several nodes without an agent.
    """
    if NODE_ADDRESS_VARIABLE in os.environ or ray.address is not None:
        return {}
    if (nodes := os.environ.get("GROUP_WORLD_SIZE", "1")) != "1":
        raise ValueError(
            f"torchrun was started on {nodes} nodes without megarl's node agents, which is not supported; "
            "start the run with `megarl launch` (docs/scaling.md)"
        )
    found = network_environment(LOOPBACK, interface_of(LOOPBACK), several=False, chosen=False)
    return {name: value for name, value in found.items() if name not in os.environ}


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


def network_environment(address: str, interface: str | None, *, several: bool, chosen: bool) -> dict[str, str]:
    """Return the variables that set this node's address and interface for vLLM, gloo and NCCL.

    `several`: the job has more nodes than this one; `chosen`: the user has named the interface. gloo would use the
    address that the host's name resolves to, which between nodes is often a loopback address, and on one node often is
    not. Between nodes NCCL chooses an interface by itself unless the user has named one.
    """
    environment = {"VLLM_HOST_IP": address}
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        if chosen or not several:
            environment["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the sign NCCL takes it as a prefix
    return environment
