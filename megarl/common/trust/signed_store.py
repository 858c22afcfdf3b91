"""A TCPStore that listens on one address. torch's own server listens on all addresses of the host (2.13)."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from megarl.common.errors import NotAuthentic

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# Texts under names, with a message authentication code (HMAC-SHA256) of name and text. Pure. torch's stores accept any
# value from anyone who reaches their port. So each value is signed with a key that only the processes of the run have,
# and is read only if its code is right: it must have been written by one of them, under the same name, and not be
# changed in a single bit.

_DIGITS = 64  # hexadecimal digits of the code


def sign(key: bytes, name: str, text: str) -> str:
    """Return `text` with the code of its name and content in front."""
    return _code(key, name, text) + text


def verify(key: bytes, name: str, value: str | bytes) -> str:
    """Return the text of a value that `sign` made with this key and this name. Raises NotAuthentic for any other."""
    if not key:
        raise ValueError("there is no key to check values with")
    try:
        content = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        content = ""
    code, text = content[:_DIGITS], content[_DIGITS:]
    if not hmac.compare_digest(code.encode(), _code(key, name, text).encode()):
        raise NotAuthentic(
            f"the value of {name!r} was not written by a process of this run, or not under this name: a process of "
            "another run or of another user has reached the run's port. Nothing was read from it"
        )
    return text


def _code(key: bytes, name: str, text: str) -> str:
    head = name.encode()
    # The length separates name and text: no other pair has the same bytes.
    return hmac.digest(key, len(head).to_bytes(8, "big") + head + text.encode(), "sha256").hex()


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
