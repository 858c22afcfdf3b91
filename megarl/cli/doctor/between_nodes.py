"""`megarl doctor --nodes` under torchrun: measures every path between the nodes, each in a process with a deadline.

A path is a backend with the environment that selects its interface. All ranks meet in the store of torchrun's agents.
They sign their values with the secret of MEGARL_RUN_DIR, which `--rdzv-backend megarl` demands on several nodes; the
values of torch's process groups are not signed. For each path every rank starts this module as a probe, because NCCL
reads its settings once and may hang or abort. Shapes: N float32 elements of a message.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from megarl.cli.doctor.machine import interfaces
from megarl.cluster.pool.network import interface_of, own_address
from megarl.cluster.torchrun import SERVED_BY_VARIABLE
from megarl.common.errors import ConfigError, NotAuthentic
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE, derived_key, run_secret
from megarl.common.trust.signed_store import connect_store, sign, verify
from megarl.common.values import MIB
from megarl.run.start.torchrun_hints import SAFE_TORCHRUN

REPORT_S = 15.0  # for a rank to notice its own deadline and to report
_START = (
    f"start one process per node (or per GPU); run on every node: {RUN_DIR_VARIABLE}=SHARED_DIRECTORY {SAFE_TORCHRUN} "
    "--nnodes N --nproc-per-node 1 --rdzv-endpoint FIRST_NODE:29400 --local-addr THIS_NODE'S_ADDRESS -m megarl doctor "
    "--nodes   Anyone who reaches the store of another torchrun can run code as you (SECURITY.md)"
)


@dataclass(frozen=True)
class Member:
    """A rank's report on itself. `route`: the interface of its route to the others, or the one asked for."""

    host: str
    interfaces: Mapping[str, str]
    route: str
    cuda: bool


@dataclass(frozen=True)
class Path:
    """One path. `environment`: per rank, the variables that select it. `required`: a run would use this path."""

    name: str
    backend: str
    environment: tuple[Mapping[str, str], ...]
    required: bool


@dataclass(frozen=True)
class Outcome:
    """One rank's rates on one path, in 10**9 bytes of payload per second. `error`: the stage and why it failed."""

    gb_per_second: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class Meeting:
    """The values of all ranks, in the store of torchrun's agents. Raises ConfigError if torchrun's store is open."""

    def __init__(self, environment: Mapping[str, str], timeout_s: float) -> None:
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE"), environment.get(SERVED_BY_VARIABLE)
        if agent != ("True", str(os.getppid())):
            raise ConfigError([f"doctor --nodes: {_START}"])
        self.rank, self.size, self.local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.host, self.port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._timeout_s, self._prefix = timeout_s, f"doctor/{environment.get('TORCHELASTIC_RESTART_COUNT')}"
        run_dir = environment.get(RUN_DIR_VARIABLE)
        self._key = derived_key(run_secret(run_dir), "doctor --nodes") if run_dir else None
        self._store = connect_store(self.host, self.port, timeout_s)

    def gather(self, what: str, own: object, margin_s: float = 0.0) -> list[Any]:
        """Return the values of all ranks under `what`. Raises ConfigError naming the ranks without a value."""
        keys = [f"{self._prefix}/{what}-{rank}" for rank in range(self.size)]
        text, bound_s = json.dumps(own), self._timeout_s + margin_s
        self._store.set(keys[self.rank], text if self._key is None else sign(self._key, keys[self.rank], text))
        deadline = time.monotonic() + bound_s
        while missing := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > deadline:
                raise ConfigError([f"doctor --nodes: waited {bound_s:.0f} s for {what} of ranks {missing}"])
            time.sleep(0.05)
        try:
            found = [(key, self._store.get(key)) for key in keys]
            return [json.loads(value if self._key is None else verify(self._key, key, value)) for key, value in found]
        except NotAuthentic as error:
            raise ConfigError([f"doctor --nodes: {error}: every rank needs the same {RUN_DIR_VARIABLE}"]) from None


def try_nodes(
    *, interface: str | None, mib: float, timeout_s: float, as_json: bool, write: Callable[[str], object]
) -> int:
    """Try all paths; rank 0 writes the report. Return 0 if the paths that a run uses work, else 1.

    `mib`: size of a message. `timeout_s`: bound of one path. Raises ConfigError as `Meeting` does, and if this machine
    lacks the interface.
    """
    import torch

    meeting = Meeting(os.environ, timeout_s)
    try:
        own_address((), interface)  # raises if this machine lacks the interface
    except ValueError as error:
        raise ConfigError([str(error).replace("launch.interface", "--interface")]) from None
    route = interface or interface_of(own_address((meeting.host,), None)) or "lo"
    # Several nodes of a test cluster may be one machine.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    facts = Member(host, interfaces(), route, torch.cuda.is_available())
    members = [Member(**each) for each in meeting.gather("facts", asdict(facts))]
    hosts = [member.host for member in members]
    results: list[tuple[Path, list[Outcome]]] = []
    leaders = ",".join(str(rank) for rank, host in enumerate(hosts) if hosts.index(host) == rank)  # first of each node
    for number, path in enumerate(plan_paths(members, configured=interface is not None)):
        device = "cpu" if path.backend == "gloo" else f"cuda:{meeting.local}"
        probe = (meeting.host, meeting.port, f"path-{number}", meeting.rank, meeting.size, path.backend, device, mib)
        module = "megarl.cli.doctor.between_nodes"
        command = [sys.executable, "-m", module, *map(str, probe), str(timeout_s), leaders]
        own = run_probe(command, {**os.environ, **path.environment[meeting.rank]}, timeout_s)
        reported = meeting.gather(f"outcome {number}", asdict(own), REPORT_S)
        results.append((path, [Outcome(**each) for each in reported]))
    content = summary(members, results)
    if meeting.rank == 0:
        write(json.dumps(content, indent=2) + "\n" if as_json else render(content))
    meeting.gather("end", True)  # the first node's agent serves the store, and ends with its ranks
    return 0 if content["can_start"] else 1


def plan_paths(members: Sequence[Member], *, configured: bool) -> list[Path]:
    """Return the paths to try, those that a run would use first. `configured`: the user has chosen the interface."""
    routes = [member.route for member in members]

    def sockets(prefix: str, names: Sequence[str]) -> tuple[dict[str, str], ...]:
        return tuple({f"{prefix}_SOCKET_IFNAME": name} for name in names)

    joined = "/".join(dict.fromkeys(routes))
    paths = [Path(f"gloo on {joined}", "gloo", sockets("GLOO", routes), True)]
    if all(member.cuda for member in members):
        nccl = sockets("NCCL", [f"={name}" for name in routes]) if configured else tuple({} for _ in members)
        paths.append(Path("NCCL as it chooses", "nccl", nccl, True))
    shared = [name for name in members[0].interfaces if all(name in member.interfaces for member in members)]
    others = [name for name in shared if set(routes) != {name}]
    return paths + [Path(f"gloo on {name}", "gloo", sockets("GLOO", [name] * len(members)), False) for name in others]


def run_probe(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run a probe and return its rates, or the stage at which it failed. A probe is killed after `timeout_s`."""
    error: str | None = None
    rates: dict[str, float] = {}
    stage = "start"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(REPORT_S)
            error = f"did not finish within {timeout_s:.0f} s"
        out.seek(0)
        err.seek(0)
        log = err.read()
        for printed in (json.loads(line) for line in out if line.startswith("{")):
            stage = printed["stage"]
            rates |= {stage: printed["gb_per_second"]} if "gb_per_second" in printed else {}
    if process.returncode != 0 and error is None:
        named = [line for line in log.splitlines() if "Error" in line.partition(":")[0]]  # torch warns after it
        error = (named or [f"exit status {process.returncode}"])[-1][:300]
    return Outcome(rates, None if error is None else f"{stage}: {error}")


def summary(members: Sequence[Member], results: Sequence[tuple[Path, Sequence[Outcome]]]) -> dict[str, Any]:
    """Return the report as plain values: for each path the rate of the slowest rank, and who failed and why."""
    paths = []
    for path, outcomes in results:
        failed = {member.host: each for member, each in zip(members, outcomes, strict=True) if each.error}
        names = dict.fromkeys(name for each in outcomes for name in each.gb_per_second)
        paths.append({
            "path": path.name, "required": path.required, "ok": not failed,
            "gb_per_second": {
                name: min(each.gb_per_second[name] for each in outcomes if name in each.gb_per_second) for name in names
            },
            "failures": "; ".join(f"{host} at {each.error}" for host, each in failed.items()),
        })  # fmt: skip
    works = all(each["ok"] for each in paths if each["required"])
    return {"nodes": [member.host for member in members], "can_start": works, "paths": paths}


def render(content: Mapping[str, Any]) -> str:
    """Return the table of bandwidths, followed by the failures of each path."""
    nodes = dict.fromkeys(content["nodes"])
    lines = [f"{len(content['nodes'])} processes on {len(nodes)} nodes: {', '.join(nodes)}"]
    row = "{:<32}{:<24}{:>9}  {}".format
    lines.append(row("path", "operation", "GB/s", "state"))
    for path in content["paths"]:
        state = "ok" if path["ok"] else "fail" if path["required"] else "warn"
        rates = {name: f"{rate:.3f}" for name, rate in path["gb_per_second"].items()}
        lines += [row(path["path"], name, rate, state) for name, rate in (rates or {"none": "-"}).items()]
    lines += [f"{path['path']}: {path['failures']}" for path in content["paths"] if not path["ok"]]
    together = "can run together" if content["can_start"] else "cannot run together: see docs/install.md"
    return "\n".join([*lines, f"the nodes {together}"]) + "\n"


def probe(arguments: Sequence[str]) -> None:
    """Act as one rank of one path: print a JSON line per stage and per measured operation, then end the process."""
    import torch
    from torch import distributed

    host, port, prefix, rank, size, backend, device, mib, timeout_s, leaders = arguments
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the parent
    timeout = timedelta(seconds=float(timeout_s))
    os.write(1, json.dumps({"stage": "connect"}).encode() + b"\n")
    store = distributed.PrefixStore(prefix, connect_store(host, int(port), float(timeout_s)))
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    distributed.init_process_group(backend, store=store, rank=int(rank), world_size=int(size), timeout=timeout)
    message_N = torch.ones(int(float(mib) * MIB) // 4, device=where)
    operations: dict[str, Callable[[torch.Tensor], object]] = {"all-reduce": distributed.all_reduce}
    for node, leader in enumerate(leaders.split(",")):
        operations[f"broadcast from node {node}"] = partial(distributed.broadcast, src=int(leader))
    for name, operation in operations.items():
        os.write(1, json.dumps({"stage": name}).encode() + b"\n")
        seconds = []
        for _ in range(4):
            message_N.fill_(1.0)
            started = time.perf_counter()
            operation(message_N)
            float(message_N[0])  # waits for a GPU
            seconds.append(time.perf_counter() - started)
        if name == "all-reduce" and message_N[0] != int(size):
            raise RuntimeError(f"an all-reduce of ones over {size} ranks returned {message_N[0].item()}")
        rate = message_N.numel() * message_N.element_size() / min(seconds[1:]) / 1e9
        os.write(1, json.dumps({"stage": name, "gb_per_second": rate}).encode() + b"\n")
    os._exit(0)  # the groups' threads may still wait for peers that have already ended


if __name__ == "__main__":
    probe(sys.argv[1:])
