"""A TCPStore that listens on one address. torch's own server listens on all addresses of the host (2.13)."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Environment variable with this node's address, set by the node's agent (megarl/cluster/nodes/launcher.py).
NODE_ADDRESS_VARIABLE = "MEGARL_NODE_ADDRESS"
_BACKLOG = 2048  # connections that wait to be accepted: all members of a weight sync connect at the same time


def serve_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Serve a store at `host` alone, and connect to it; port 0: a free one. `timeout_s`: of one request.

    Raises:
        ValueError: `host` means all addresses.
        OSError: `host` is no address of this machine, or the port is taken.
    """
    from torch.distributed import TCPStore

    listener = _listen(host, port)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    # The store owns the socket from here on, and closes it.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a store that another process serves. `timeout_s`: of connecting, and of one request."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of `host`, and on no other one."""
    family, address = one_address(host)
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def one_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address of a host. Raises ValueError if that means all addresses, OSError if it is none."""
    family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified:
        raise ValueError(f"{host!r} means all addresses, on which nothing of a run may listen: name one address")
    return family, str(address[0])
