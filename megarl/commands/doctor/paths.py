"""The paths between nodes that `megarl doctor --nodes` tries, the table of what was measured, and the fixes. Pure.

A path is a backend with the environment that selects its interface. `as configured` marks the paths that a run would
use; if one of these fails, the command fails. Another path that fails is a warning: not every interface of a node has
to reach the other nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table

BackendName = Literal["gloo", "nccl"]


# What gloo and NCCL write, in lower case, and the fix; the first match counts.
_FIXES = (
    (
        ("ibv_reg_mr", "cannot allocate memory"),
        "RDMA cannot lock memory: ulimit -l unlimited on every node (SLURM: PropagateResourceLimitsExcept=MEMLOCK)",
    ),
    (
        ("ibv_", "net/ib"),
        "RDMA fails: check ibstat on every node, name the good ports in NCCL_IB_HCA, or set NCCL_IB_DISABLE=1",
    ),
    (("duplicate gpu",), "two ranks share a GPU: one process per GPU (srun --gpus-per-task=1), or one per node"),
    (
        ("unable to find address for", "no socket interface found"),
        "the interface is not on every node: name one that is, with --interface and launch.interface",
    ),
)


@dataclass(frozen=True)
class MemberFacts:
    """A process's report on itself. `route`: the interface of its route to the first node, or the one asked for."""

    host: str
    interfaces: Mapping[str, str]
    route: str
    cuda: bool
    rdma: bool


@dataclass(frozen=True)
class PathToTry:
    """One path. `environment`: per rank, the variables that select it. `required`: a run would use this path."""

    name: str
    backend: BackendName
    environment: tuple[Mapping[str, str], ...]
    required: bool


@dataclass(frozen=True)
class Outcome:
    """One rank's observations on one path.

    `gb_per_second`: per operation, in 10**9 bytes of payload per second. `stage`: the operation that was reached.
    `error`: None if all of it succeeded. `log`: what the backend wrote.
    """

    gb_per_second: Mapping[str, float] = field(default_factory=dict)
    stage: str = "start"
    error: str | None = None
    log: str = ""


def plan_paths(members: Sequence[MemberFacts], *, configured: bool) -> list[PathToTry]:
    """Return the paths to try, those that a run would use first.

    `configured`: the user has chosen the interface, so that NCCL's sockets use it too, as with `launch.interface`.
    """
    routes = [member.route for member in members]

    def sockets(prefix: str, names: Sequence[str]) -> tuple[dict[str, str], ...]:
        return tuple({f"{prefix}_SOCKET_IFNAME": name} for name in names)

    paths = [PathToTry(f"gloo on {_join(routes)}", "gloo", sockets("GLOO", routes), True)]
    if all(member.cuda for member in members):
        nccl = sockets("NCCL", routes) if configured else tuple({} for _ in members)
        paths.append(PathToTry("NCCL as it chooses", "nccl", nccl, True))
        if any(member.rdma for member in members):
            tcp = tuple({**each, "NCCL_IB_DISABLE": "1"} for each in sockets("NCCL", routes))
            paths.append(PathToTry(f"NCCL over TCP on {_join(routes)}", "nccl", tcp, False))
    others = [name for name in members[0].interfaces if all(name in member.interfaces for member in members)]
    for name in others:
        if set(routes) != {name}:
            names = [name] * len(members)
            paths.append(PathToTry(f"gloo on {name}", "gloo", sockets("GLOO", names), False))
    return paths


def _join(names: Sequence[str]) -> str:
    return "/".join(dict.fromkeys(names))


def node_leaders(members: Sequence[MemberFacts]) -> list[int]:
    """Return the first rank of each node, in rank order."""
    first: dict[str, int] = {}
    for rank, member in enumerate(members):
        first.setdefault(member.host, rank)
    return list(first.values())


def advice(path: PathToTry, outcomes: Sequence[Outcome]) -> str:
    """Return what to do about a path that failed."""
    if not path.required:
        return "no fix is needed if a run does not use this path; launch.interface must not name this interface"
    text = " ".join(f"{outcome.error} {outcome.log}" for outcome in outcomes if outcome.error).lower()
    for words, fix in _FIXES:
        if any(word in text for word in words):
            return fix
    if any(outcome.error and outcome.stage == "connect" for outcome in outcomes):
        return (
            "the nodes do not reach each other: open all TCP ports between them in the firewall, or name an interface "
            "that they share with --interface and launch.interface"
        )
    return "the connection broke under load: compare MTU and cables of the nodes that are named"


def failures(members: Sequence[MemberFacts], outcomes: Sequence[Outcome]) -> str:
    """Return which nodes failed, at which operation and why; empty if none did."""
    said: dict[str, list[str]] = {}
    for member, outcome in zip(members, outcomes, strict=True):
        if outcome.error is not None:
            said.setdefault(f"{outcome.stage}: {outcome.error}", []).append(member.host)
    return "; ".join(f"{', '.join(dict.fromkeys(hosts))} at {what}" for what, hosts in said.items())


@dataclass(frozen=True)
class PathResult:
    """One path with the outcome of every rank."""

    path: PathToTry
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """True if no rank failed."""
        return all(outcome.error is None for outcome in self.outcomes)

    def slowest(self) -> dict[str, float]:
        """Return for each operation the lowest rate of all ranks that measured it, in GB/s."""
        rates: dict[str, float] = {}
        for outcome in self.outcomes:
            for name, rate in outcome.gb_per_second.items():
                rates[name] = min(rate, rates.get(name, rate))
        return rates


def all_required_work(results: Sequence[PathResult]) -> bool:
    """Tell whether every path that a run would use works."""
    return all(result.ok for result in results if result.path.required)


def render_paths(members: Sequence[MemberFacts], results: Sequence[PathResult]) -> str:
    """Return the table of bandwidths, followed by the fix of each path that failed."""
    stream = StringIO()
    console = Console(file=stream, width=120, highlight=False)
    hosts = ", ".join(dict.fromkeys(member.host for member in members))
    console.print(f"{len(members)} processes on {len(node_leaders(members))} nodes: {hosts}")
    table = Table("path", "operation", "GB/s", "state", box=None, padding=(0, 2))
    for result in results:
        state = "ok" if result.ok else "fail" if result.path.required else "warn"
        for name, rate in result.slowest().items():
            table.add_row(result.path.name, name, f"{rate:.3f}", state)
        if not result.slowest():
            table.add_row(result.path.name, "none", "-", state)
    console.print(table)
    for result in results:
        if not result.ok:
            console.print(f"\n{result.path.name}: {failures(members, result.outcomes)}")
            console.print(f"  -> {advice(result.path, result.outcomes)}")
    console.print(f"\n{_conclusion(members, results)}")
    return stream.getvalue()


def _conclusion(members: Sequence[MemberFacts], results: Sequence[PathResult]) -> str:
    if not all_required_work(results):
        return "the nodes cannot run together: fix what is marked fail"
    if len(node_leaders(members)) == 1:
        return "all processes are on one node, so nothing was measured between nodes: start one on every node"
    return "the nodes can run together"


def to_json(members: Sequence[MemberFacts], results: Sequence[PathResult]) -> str:
    """Return the results as JSON text."""
    content = {
        "nodes": [member.host for member in members],
        "can_start": all_required_work(results),
        "paths": [
            {
                "path": result.path.name,
                "required": result.path.required,
                "ok": result.ok,
                "gb_per_second": result.slowest(),
                "failures": failures(members, result.outcomes),
                "fix": "" if result.ok else advice(result.path, result.outcomes),
            }
            for result in results
        ],
    }
    return json.dumps(content, indent=2) + "\n"
