"""Finds the processes of a run on this host and the sockets on which they listen, for `megarl doctor --run`."""

from __future__ import annotations

import os
import platform
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from megarl.cluster.handle import SPEC_FILE, SupervisorSpec, read_state
from megarl.cluster.ray_head import TOKEN_FILE
from megarl.commands.doctor.chosen_addresses import chosen_addresses
from megarl.commands.doctor.listeners import (
    MANY,
    Listener,
    Verdict,
    all_locked,
    judge,
    listeners_to_json,
    render_listeners,
    role_of,
)
from megarl.commands.doctor.unlocked_sockets import of_engine, of_trainer_rank
from megarl.common.errors import ConfigError
from megarl.common.processes import ProcessId, is_alive
from megarl.config.pools import resolve_pools
from megarl.config.schema import Config
from megarl.models.read_config import load_info
from megarl.telemetry.prometheus import read_endpoint

_ACCEPTS = 0x10000  # __SO_ACCEPTCON of /proc/net/unix: the socket listens


def examine_run(run_dir: Path, *, as_json: bool, write: Callable[[str], object]) -> int:
    """Write the table of listening sockets of the run's processes on this host; return 1 if one is not locked.

    Raises ConfigError if the run has no process here, or one whose sockets this user may not see.
    """
    state = read_state(run_dir)
    if state is None:
        raise ConfigError([f"{run_dir} has no supervisor.json: no run has started there, or it is not a run directory"])
    roles = find_roles(run_dir.resolve(), state)
    if not roles:
        raise ConfigError([f"no process of {run_dir} runs on this host; its supervisor was started on {state['host']}"])
    verdicts = judge_run(run_dir, state, find_listeners(roles), roles)
    write(listeners_to_json(verdicts) if as_json else render_listeners(verdicts))
    return 0 if all_locked(verdicts) else 1


def judge_run(
    run_dir: Path, state: dict[str, Any], listeners: Iterable[Listener], roles: Mapping[int, str]
) -> list[Verdict]:
    """Return a verdict for each socket of the run's processes, whose `roles` are known by pid."""
    found = read_endpoint(run_dir)
    spec = _spec(run_dir, roles)
    config = None if spec is None else Config.model_validate_json(spec.config_json)
    return judge(
        listeners,
        ray_on_loopback=is_on_loopback(str(state["address"]), config),
        unlocked={} if spec is None or config is None else unlocked_of(spec, config, roles),
        endpoint=(found.pid, found.port) if found is not None else None,
        chosen=chosen_addresses(roles, config, None if found is None else found.pid),
    )


def is_on_loopback(address: str, config: Config | None) -> bool:
    """Tell whether the run's Ray listens on loopback alone; `address` is Ray's, "" before it has one.

    Of a Ray cluster of the user's that is not known, whatever its address is: its nodes have addresses of their own.
    """
    if config is not None and config.ray.address is not None:
        return False
    if not address and config is not None:
        return resolve_pools(config).nodes == 1 and config.launch.interface is None
    return address.rpartition(":")[0].strip("[]") in {"", "127.0.0.1", "::1"}


def _spec(run_dir: Path, roles: Mapping[int, str]) -> SupervisorSpec | None:
    """Return what the launcher has told the supervisor. None if the file is gone and nobody here needs its config.

    Raises ConfigError if it is gone, and processes are here whose sockets follow from the config.
    """
    try:
        return SupervisorSpec.load(run_dir / "logs" / SPEC_FILE)
    except FileNotFoundError as error:
        if not {"trainer rank", "engine", "door"} & set(roles.values()):
            return None
        raise ConfigError([f"{error.filename} is gone, which tells what the run may listen on"]) from None


def unlocked_of(spec: SupervisorSpec, config: Config, roles: Mapping[int, str]) -> dict[int, int]:
    """Return how many sockets without a lock each trainer rank and each engine may have, by pid.

    `config`: that of `spec`. With GPUs any number: that of NCCL's sockets is not known.
    """
    ours = {pid: role for pid, role in roles.items() if role in {"trainer rank", "engine"}}
    if spec.cuda or not ours:
        return dict.fromkeys(ours, MANY)
    has_saved = any(config.checkpoint_dir.glob("*iter_*"))
    has_trainer = not spec.serves and "launcher" not in roles.values()
    experts = bool(load_info(config.model.path).num_experts)
    found = {}
    for pid, role in ours.items():
        if role == "trainer rank":
            found[pid] = of_trainer_rank(config, _rank(pid), has_saved=has_saved)
        elif not any("multiprocessing.resource_tracker" in part for part in _command(pid)):  # it computes nothing
            found[pid] = of_engine(has_experts=experts, syncs_weights=has_trainer and not _teaches(pid, roles))
    return found


def _rank(pid: int) -> int:
    """Return the number that torchrun has given to a trainer rank; 0 if the process has ended."""
    try:
        return int(psutil.Process(pid).environ().get("RANK", "0"))
    except psutil.Error:
        return 0


def _teaches(pid: int, roles: Mapping[int, str]) -> bool:
    """Tell whether an engine's process is of a teacher, whose weights stay."""
    try:
        return any(roles.get(each.pid) == "teacher's engine" for each in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def find_roles(run_dir: Path, state: dict[str, Any]) -> dict[int, str]:
    """Return the role of each living process of the run on this host, by pid."""
    launcher = 0
    roots: set[int] = set(_of_this_run(run_dir))
    if state["host"] == platform.node():
        known = [ProcessId(**each) for each in (state["process"], state["agent"], *state.get("children", ()))]
        roots |= {process.pid for process in known if is_alive(process)}
        launcher = state["agent"]["pid"]
    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    found = {pid for pid in parents if any(above in roots for above in _with_ancestors(pid, parents))}
    if launcher != os.getpid():
        found.discard(os.getpid())
    roles: dict[int, str] = {}

    def role(pid: int) -> str:
        if pid not in roles:
            parent = parents.get(pid, 0)
            above = role(parent) if parent in found else ""
            roles[pid] = role_of(_command(pid), above, is_launcher=pid == launcher)
        return roles[pid]

    return {pid: role(pid) for pid in sorted(found)}


def _of_this_run(run_dir: Path) -> Iterator[int]:
    """Yield processes that name the run: agents in their command lines, Ray's in the path of their token."""
    token = str(run_dir / TOKEN_FILE)
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            agent = "megarl.cluster.nodes.agent" in command and any(part.startswith(f"{run_dir}/") for part in command)
            if agent or process.environ().get("RAY_AUTH_TOKEN_PATH") == token:
                yield process.pid
        except psutil.Error:
            continue  # it has ended, or it is another user's, so not the run's


def _with_ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        yield pid
        pid = parents[pid]


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def find_listeners(roles: dict[int, str]) -> list[Listener]:
    """Return the sockets on which the processes of `roles` listen now. A process that has ended has none.

    Raises ConfigError for a process whose sockets cannot be seen: of another user, or in another network namespace.
    """
    paths = listening_paths(Path("/proc/net/unix").read_text().splitlines()[1:])
    listeners: list[Listener] = []
    for pid, role in roles.items():
        try:
            if os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                where = f"process {pid} ({role}) is in another network namespace"
                raise ConfigError([f"{where}, where doctor cannot see its sockets: run doctor in its container"])
            connections = psutil.Process(pid).net_connections(kind="all")
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
        except (psutil.AccessDenied, PermissionError):
            hidden = f"the sockets of process {pid} ({role}) cannot be seen: run doctor as the user of the run"
            raise ConfigError([hidden]) from None
        listeners += listeners_of(pid, role, connections, paths)
    return listeners


def listeners_of(pid: int, role: str, connections: Iterable[Any], paths: set[str]) -> Iterator[Listener]:
    """Yield the listening ones of a process's `connections`, psutil's. `paths`: the Unix sockets that listen."""
    seen = set()
    for each in connections:
        if each.family == socket.AF_UNIX:
            if each.laddr in paths and each.laddr not in seen:  # an accepted connection has the same path
                seen.add(each.laddr)
                yield Listener(pid, role, "unix", each.laddr, open_to_others=is_open_to_others(Path(each.laddr)))
        elif each.type == socket.SOCK_STREAM and each.status == psutil.CONN_LISTEN:
            kind = "TCP6" if each.family == socket.AF_INET6 else "TCP"
            yield Listener(pid, role, kind, each.laddr.ip, each.laddr.port)  # type: ignore[arg-type]


def listening_paths(lines: Iterable[str]) -> set[str]:
    """Return the paths of listening sockets from the lines of /proc/net/unix below its head."""
    rows = (line.split(maxsplit=7) for line in lines)
    return {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _ACCEPTS}


def is_open_to_others(path: Path) -> bool:
    """Tell whether another user may connect: the socket is writable for others, and all folders above can be entered.

    An abstract socket, whose name begins with `@`, has no permissions. One that was removed cannot be reached.
    """
    if str(path).startswith("@"):
        return True
    try:
        if not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        return all(folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in path.parents)
    except FileNotFoundError:
        return False
