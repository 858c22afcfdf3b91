"""The store at which the members of `megarl doctor --nodes` meet: rank 0 serves it, at one address.

Its values are JSON, of which nothing is executed. They are signed with the secret of MEGARL_RUN_DIR, which torchrun's
rendezvous demands on several nodes; without that directory the members have no secret in common. What torch's process
groups keep there, gloo's addresses and NCCL's id, is torch's and is not signed.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from megarl.cluster.nodes.network import own_address
from megarl.cluster.ray_head import LOOPBACK
from megarl.commands.doctor.members import Member
from megarl.common.bound_store import connect_store, serve_store
from megarl.common.errors import ConfigError, NotAuthentic
from megarl.common.json_values import JsonValue
from megarl.common.run_secret import RUN_DIR_VARIABLE, derived_key, run_secret
from megarl.common.signed_values import sign, verify

if TYPE_CHECKING:
    from torch.distributed import TCPStore


class Meeting:
    """One member's connection to the store, whose values all have a name. `key`: that of their signatures, if any."""

    def __init__(self, store: TCPStore, key: bytes | None) -> None:
        self._store, self._key = store, key
        self.host, self.port = store.host, store.port

    def put(self, name: str, value: object) -> None:
        """Set a value, which JSON can represent."""
        _put(self._store, self._key, name, value)

    def has(self, name: str) -> bool:
        """Tell whether a value is there."""
        return bool(self._store.check([name]))

    def get(self, name: str) -> JsonValue:
        """Return a value that is there. Raises ConfigError if no member has written it."""
        return _get(self._store, self._key, name)


def meet(member: Member, interface: str | None, timeout_s: float) -> Meeting:
    """Serve the store on rank 0, and connect to it on the others; `timeout_s` is the time limit of each request.

    Under torchrun rank 0 serves it at the address of `interface` if that is given, and the others learn it from the
    store of torchrun's agent.

    Raises:
        ConfigError: the store can neither be served nor be reached, or the secret cannot be used.
    """
    try:
        key = _key()
        if member.agents_name is not None:
            store = _through_agent(member, member.agents_name, interface, key, timeout_s)
        elif member.rank == 0:
            store = serve_store(address_to_serve(member.host, member.others), member.port, timeout_s)
        else:
            store = connect_store(member.host, member.port, timeout_s)
    except ConfigError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError([_why_not(member, timeout_s, error)]) from None
    return Meeting(store, key)


def _key() -> bytes | None:
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    return derived_key(run_secret(run_dir), "doctor --nodes") if run_dir else None


def _through_agent(member: Member, name: str, interface: str | None, key: bytes | None, timeout_s: float) -> TCPStore:
    """Return the store, whose address rank 0 puts into the store of torchrun's agent under `name`."""
    agents = connect_store(member.host, member.port, timeout_s)
    if member.rank > 0:
        host, port = _get(agents, key, name)
        return connect_store(LOOPBACK if member.one_host else host, port, timeout_s)
    if member.one_host:
        own = LOOPBACK
    else:
        own = own_address((), interface) if interface is not None else address_to_serve(member.host, ())
    store = serve_store(own, 0, timeout_s)
    _put(agents, key, name, [own, store.port])
    return store


def address_to_serve(host: str, others: Sequence[str]) -> str:
    """Return the one address of this machine at which other nodes reach it by the name or address `host`.

    A host's own name may resolve to a loopback address, which is of no use to `others`: then it is the address on the
    route to them. Raises OSError for an unknown name.
    """
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    if host in found:
        return host
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    own = [each for each in found if each in here and not ipaddress.ip_address(each).is_loopback]
    if own:
        return own[0]
    return own_address(others) if others else found[0]


def _put(store: TCPStore, key: bytes | None, name: str, value: object) -> None:
    text = json.dumps(value)
    store.set(name, text if key is None else sign(key, name, text))


def _get(store: TCPStore, key: bytes | None, name: str) -> JsonValue:
    value = store.get(name)
    try:
        return json.loads(value if key is None else verify(key, name, value))
    except NotAuthentic as error:
        raise ConfigError([
            f"doctor --nodes: {error}. Every member needs the same directory in {RUN_DIR_VARIABLE}, or none does"
        ]) from None  # fmt: skip


def _why_not(member: Member, timeout_s: float, error: Exception) -> str:
    where, told = f"{member.host}:{member.port}", str(error).partition("\n")[0]
    if member.rank == 0:
        return (
            f"doctor --nodes: rank 0 cannot serve the store at which all processes meet. They know it by {where}, "
            f"which has to be an address of the first node ({told}): torchrun's --local-addr, or SLURM's NodeAddr"
        )
    return (
        f"doctor --nodes: rank {member.rank} did not reach rank 0 at {where} within {timeout_s:.0f} s ({told}); the "
        "first node has to be reachable by that name, with its TCP ports open"
    )
