"""The listening sockets of a run: which one is known, what protects it, and whether that is enough. Pure.

The kernel tells a socket's process and address, not its purpose. So a socket is known if its process may have one of
its kind, and the sockets of that kind are not more than the process may have.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Column, Table

from megarl.commands.doctor.report import Level

SocketKind = Literal["TCP6", "TCP", "unix"]
SocketLock = Literal["token", "curve", "hmac", "loopback only", "file mode", "none"]

NETWORK_RULE = "let only the nodes of the job reach this port: see the network rule in SECURITY.md"
ADDRESS_FIX = "it must be bound to one address"
LOOPBACK_FIX = (
    "the run is on one host, so it must be bound to loopback; only door.host, telemetry.prometheus_host, "
    "launch.interface and variables such as GLOO_SOCKET_IFNAME may name another address for it"
)
TORCHRUN_FIX = "torchrun unpickles what strangers write there: start it with --rdzv-backend megarl, see SECURITY.md"
UNKNOWN_FIX = (
    "find out what opened it: the process should not have it, or has more of its kind than it should. If it is the "
    "run's, add it to KNOWN in megarl/commands/doctor/listeners.py, or count it in unlocked_sockets.py"
)
MANY = 1000


@dataclass(frozen=True)
class Listener:
    """One listening socket. `role`: its process, as `role_of` names it; `host`: its address, a path for kind `unix`.

    TCP6 is IPv6's family; Ray's gRPC and torch's own TCPStore, and nothing else here, take it for IPv4 addresses too.
    `open_to_others`: another user of this host may connect to the path.
    """

    pid: int
    role: str
    kind: SocketKind
    host: str
    port: int = 0
    open_to_others: bool = False

    @property
    def address(self) -> str:
        """The address as a table shows it."""
        return self.host if self.kind == "unix" else f"{'*' if self.is_wildcard else self._ip}:{self.port}"

    def is_at(self, hosts: Collection[str]) -> bool:
        """Tell whether the socket listens at one of these addresses."""
        return self.kind != "unix" and str(self._ip) in hosts

    @property
    def is_wildcard(self) -> bool:
        """True if the socket listens on all interfaces."""
        return self.kind != "unix" and self._ip.is_unspecified

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host reach the socket."""
        return self.kind != "unix" and self._ip.is_loopback

    @property
    def _ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        address = ipaddress.ip_address(self.host)
        return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True)
class Known:
    """Up to `most` sockets that a process of one role may have. `lock`: what protects them beyond their address.

    `most` None: as many as `judge` is told of the process.
    """

    what: str
    kind: SocketKind
    lock: SocketLock
    most: int | None = MANY


RAY_CALLS = Known("Ray's calls", "TCP6", "token", 1)
ENGINE_PARTS = Known("between the engine's processes", "unix", "file mode")
COLLECTIVES = Known("gloo and NCCL", "TCP", "none", None)
PROMETHEUS = Known("Prometheus endpoint (HTTP)", "TCP", "token", 1)  # told from gloo's sockets by its port
TORCH_STORE = Known("torch's own store", "TCP6", "none")  # always on all interfaces, so always a failure
KNOWN: dict[str, tuple[Known, ...]] = {
    "Ray's gcs_server": (Known("Ray's control store", "TCP6", "token", 1),),
    "Ray's raylet": (
        Known("Ray's node and object managers", "TCP6", "token", 2),
        Known("Ray's processes of this node", "unix", "file mode", 2),
    ),
    "Ray's agents": (Known("Ray's agents", "TCP", "token", 1), Known("Ray's agents", "TCP6", "token", 1)),
    "supervisor": (RAY_CALLS,),
    "rollout controller": (RAY_CALLS,),
    "agent worker": (RAY_CALLS,),
    "door": (RAY_CALLS, Known("door (HTTP)", "TCP", "token", 1)),
    "environment server": (
        Known("environment server", "unix", "file mode"),
        Known("model calls of the environment's programs", "TCP", "token"),
    ),
    "queue controller": (RAY_CALLS, Known("trajectory queue", "TCP", "curve", 2)),
    "queue storage": (RAY_CALLS, Known("trajectory queue", "TCP", "curve", 1)),
    "engine replica": (RAY_CALLS, ENGINE_PARTS),
    "teacher's engine": (RAY_CALLS, ENGINE_PARTS),
    "engine": (ENGINE_PARTS, COLLECTIVES),
    # The stores of checkpoints, weight sync and rendezvous check each value; gloo and NCCL beside them check nothing.
    "trainer rank": (RAY_CALLS, Known("stores (hmac), gloo and NCCL (none)", "TCP", "none", None), TORCH_STORE),
    "torchrun": (Known("rendezvous store", "TCP", "hmac", 2), TORCH_STORE),
    "launcher": (RAY_CALLS,),
    "idle Ray worker": (RAY_CALLS,),
}
_RAY_ROLES = {
    "AgentWorker": "agent worker",
    "IDLE": "idle Ray worker",
    "DashboardAgent": "Ray's agents",
    "RuntimeEnvAgent": "Ray's agents",
    "DoorActor": "door",
    "EngineReplica": "engine replica",
    "RolloutController": "rollout controller",
    "ServingController": "rollout controller",
    "TransferQueueController": "queue controller",
    "SimpleStorageUnit": "queue storage",
    "TeacherEngine": "teacher's engine",
}
_MODULE_ROLES = {
    "megarl.cluster.supervisor": "supervisor",
    "megarl.cluster.guardian": "guardian",
    "megarl.cluster.nodes.agent": "node agent",
    "megarl.cluster.nodes.raylet": "raylet's parent",
    "megarl.cluster.nodes.torchrun": "torchrun",
    "megarl.rewards.worker": "reward worker",
    "torch.distributed.run": "torchrun",
}

_ENVIRONMENT_PROGRAM = "megarl/environments/server_program.py"  # runs under the Python of another environment


def role_of(command: Sequence[str], parent_role: str, *, is_launcher: bool = False) -> str:
    """Return the role of a process from its command line; its program's name if it has none.

    `parent_role`: that of the process that started it; `is_launcher`: with its end the run's supervisor ends.
    """
    program = command[0].strip() if command else "?"
    role = name = program.rpartition("/")[2]
    module = next((after for option, after in itertools.pairwise(command) if option == "-m"), "")
    if actor := re.match(r"ray::(\w+)", program):
        role = _RAY_ROLES.get(actor[1], program)
    elif program.startswith("VLLM::") or parent_role in {"engine replica", "teacher's engine", "engine"}:
        role = "engine"  # vLLM's title is not always there: setproctitle needs the first variable of the environment
    elif name in {"gcs_server", "raylet"}:
        role = f"Ray's {name}"
    elif parent_role == "environment server" or any(part.endswith(_ENVIRONMENT_PROGRAM) for part in command[1:]):
        role = "environment server"
    elif module in _MODULE_ROLES:
        role = _MODULE_ROLES[module]
    elif "torchrun" in {name, *(part.rpartition("/")[2] for part in command[1:2])}:
        role = "torchrun"
    elif parent_role == "torchrun":
        role = "trainer rank"
    elif is_launcher:
        role = "launcher"
    return role


@dataclass(frozen=True)
class Verdict:
    """One socket with what protects it. `fail`: it is unknown, or a stranger reaches it and should not."""

    level: Level
    listener: Listener
    what: str
    lock: SocketLock
    fix: str = ""


def judge(
    listeners: Iterable[Listener],
    *,
    ray_on_loopback: bool,
    unlocked: Mapping[int, int],
    endpoint: tuple[int, int] | None = None,
    chosen: Mapping[int, Collection[str]] | None = None,
) -> list[Verdict]:
    """Return a verdict for each socket, the failures first.

    `ray_on_loopback`: the run's Ray has a loopback address, so the run is on one host, where all other sockets must be
    on loopback too. With any other address, Ray 2.60.0 listens on all interfaces.
    `unlocked`: by pid, how many sockets without a lock a trainer rank or an engine may have; 0 for another process.
    `endpoint`: pid and port of the endpoint for Prometheus, if the run has one.
    `chosen`: by pid, the addresses beyond loopback that the user has named for sockets of that process.
    """
    verdicts = []
    chosen = chosen or {}
    seen: Counter[tuple[int, Known]] = Counter()
    # Those on all interfaces last, so that none of them takes the place of one that is bound as it should be.
    for listener in sorted(
        listeners, key=lambda each: (each.is_wildcard, each.role, each.pid, each.kind, each.address)
    ):
        known = None
        scraped = listener.kind == "TCP" and (listener.pid, listener.port) == endpoint
        for each in (PROMETHEUS,) if scraped else KNOWN.get(listener.role, ()):
            most = unlocked.get(listener.pid, 0) if each.most is None else each.most
            if each.kind == listener.kind and seen[listener.pid, each] < most:
                known = each
                seen[listener.pid, each] += 1
                break
        leaves_loopback = not ray_on_loopback or listener.is_at(chosen.get(listener.pid, ()))
        verdicts.append(_judge(listener, known, ray_on_loopback, leaves_loopback))
    order = ("fail", "warn", "ok")
    return sorted(verdicts, key=lambda verdict: order.index(verdict.level))


def _judge(listener: Listener, known: Known | None, ray_on_loopback: bool, leaves_loopback: bool) -> Verdict:
    """Judge one socket. `leaves_loopback`: it may be at another address of this host than a loopback one."""
    level: Level = "ok"
    what, lock, fix = (known.what, known.lock, "") if known is not None else ("unknown", "none", UNKNOWN_FIX)
    if known is None:
        level = "fail"
    elif listener.open_to_others:
        level, lock, fix = "fail", "none", "other users of this host can connect: start the run with umask 022"
    elif listener.is_wildcard:
        # Ray's C++ code alone has no choice between loopback and all interfaces.
        open_ray = listener.kind == "TCP6" and known.lock == "token" and not ray_on_loopback
        level, fix = ("warn", NETWORK_RULE) if open_ray else ("fail", ADDRESS_FIX)
        fix = TORCHRUN_FIX if known == TORCH_STORE else fix
    elif listener.kind != "unix" and not listener.is_loopback and not leaves_loopback:
        level, fix = "fail", LOOPBACK_FIX
    elif lock == "none" and listener.is_loopback:
        lock = "loopback only"
    elif lock == "none":
        level, fix = "warn", NETWORK_RULE
    return Verdict(level, listener, what, lock, fix)


def all_locked(verdicts: Iterable[Verdict]) -> bool:
    """Tell whether no socket is a failure."""
    return all(verdict.level != "fail" for verdict in verdicts)


def render_listeners(verdicts: Sequence[Verdict]) -> str:
    """Return the table of sockets, followed by each fix and a conclusion."""
    stream = StringIO()
    console = Console(file=stream, width=140, highlight=False)
    address = Column("address", overflow="fold")
    table = Table("state", "process", "pid", address, "what", "lock", box=None, padding=(0, 2))
    for verdict in verdicts:
        listener = verdict.listener
        table.add_row(verdict.level, listener.role, str(listener.pid), listener.address, verdict.what, verdict.lock)
    console.print(table)
    for fix in dict.fromkeys(verdict.fix for verdict in verdicts if verdict.fix):
        which = ", ".join(verdict.listener.address for verdict in verdicts if verdict.fix == fix)
        console.print(f"\n{which}\n  -> {fix}")
    failed = sum(verdict.level == "fail" for verdict in verdicts)
    for_network = sum(verdict.level == "warn" for verdict in verdicts)
    if failed:
        conclusion = f"{failed} of {len(verdicts)} sockets are not locked"
    elif for_network:
        conclusion = f"{len(verdicts)} sockets are known; the network must protect {for_network} of them"
    else:
        conclusion = f"{len(verdicts)} sockets are known and locked"
    console.print(f"\n{conclusion}")
    return stream.getvalue()


def listeners_to_json(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as JSON text."""
    sockets = [{**asdict(verdict), "address": verdict.listener.address} for verdict in verdicts]
    return json.dumps({"locked": all_locked(verdicts), "sockets": sockets}, indent=2) + "\n"
