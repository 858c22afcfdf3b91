"""`megarl doctor --nodes`: tries every path between the nodes, each in a process of its own with a deadline.

All processes meet at a store of rank 0 (`meeting.py`). Rank 0 plans the paths from what the members say of themselves;
for each path every member starts a probe (`path_probe.py`) and reports what it saw. Whoever is missing is named.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from megarl.cluster.nodes.network import interface_of, own_address
from megarl.commands.doctor.machine import interfaces, rdma_ports
from megarl.commands.doctor.meeting import Meeting, meet
from megarl.commands.doctor.members import Member
from megarl.commands.doctor.paths import (
    MemberFacts,
    Outcome,
    PathResult,
    PathToTry,
    all_required_work,
    node_leaders,
    plan_paths,
    render_paths,
    to_json,
)
from megarl.common.errors import ConfigError
from megarl.common.json_values import JsonValue

REPORT_S = 15.0  # for a member to notice its own deadline and to report
REAP_S = 5.0  # for the output of a killed probe to end
_PROBE = "megarl.commands.doctor.path_probe"


def try_nodes(
    member: Member,
    *,
    interface: str | None,
    mib: float,
    timeout_s: float,
    as_json: bool,
    write: Callable[[str], object],
) -> int:
    """Try all paths between the members; rank 0 writes the report. Return 0 if the paths that a run uses work, else 1.

    `mib`: size of a message. `timeout_s`: bound of one path.

    Raises:
        ConfigError: the interface is not here, or members have not come or been reached within `timeout_s`.
    """
    own_facts = _own_facts(member, interface)
    meeting = meet(member, interface, timeout_s)
    meeting.put(f"member-{member.rank}", asdict(own_facts))
    members = [MemberFacts(**facts) for facts in _collect(meeting, "member", member.size, timeout_s)]
    paths = plan_paths(members, configured=interface is not None)
    results = []
    for number, path in enumerate(paths):
        own = _try(member, meeting, members, path, f"path-{number}", mib, timeout_s)
        meeting.put(f"outcome-{number}-{member.rank}", asdict(own))
        outcomes = _collect(meeting, f"outcome-{number}", member.size, timeout_s + REPORT_S)
        results.append(PathResult(path, tuple(Outcome(**outcome) for outcome in outcomes)))
    if member.rank == 0:
        write(to_json(members, results) if as_json else render_paths(members, results))
    _leave(meeting, member, timeout_s)
    return 0 if all_required_work(results) else 1


def _own_facts(member: Member, interface: str | None) -> MemberFacts:
    import torch

    try:
        route = interface or interface_of(own_address((member.host,), None))
        own_address((), interface)  # raises if the interface is not here
    except ValueError as error:
        raise ConfigError([str(error).replace("launch.interface", "--interface")]) from None
    # Several nodes of a test cluster may be one machine.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    cuda = torch.cuda.is_available()
    return MemberFacts(host, interfaces(), route or "lo", cuda, "ACTIVE" in rdma_ports().values())


def _collect(meeting: Meeting, what: str, size: int, timeout_s: float) -> list[JsonValue]:
    """Return the values that all ranks have stored under `what`. Raises ConfigError naming the ranks that have not."""
    deadline = time.monotonic() + timeout_s
    keys = [f"{what}-{rank}" for rank in range(size)]
    while missing := [rank for rank, key in enumerate(keys) if not meeting.has(key)]:
        if time.monotonic() > deadline:
            raise ConfigError([
                f"doctor --nodes: waited {timeout_s:.0f} s for {what} of ranks {missing}, {size - len(missing)} of "
                f"{size} have answered; does every node run the command, with the same --timeout?"
            ])  # fmt: skip
        time.sleep(0.05)
    return [meeting.get(key) for key in keys]


def _leave(meeting: Meeting, member: Member, timeout_s: float) -> None:
    """Let rank 0, which holds the store, end last."""
    meeting.put(f"left-{member.rank}", True)
    if member.rank == 0:
        _collect(meeting, "left", member.size, timeout_s)


def _try(
    member: Member,
    meeting: Meeting,
    members: Sequence[MemberFacts],
    path: PathToTry,
    prefix: str,
    mib: float,
    timeout_s: float,
) -> Outcome:
    """Run this rank's probe of one path, at most `timeout_s` seconds."""
    device = "cpu"
    if path.backend == "nccl":
        import torch

        device = f"cuda:{member.local % torch.cuda.device_count()}"
    leaders = ",".join(map(str, node_leaders(members)))
    command = [
        sys.executable, "-m", _PROBE, meeting.host, str(meeting.port), prefix, str(member.rank), str(member.size),
        path.backend, device, str(mib), str(timeout_s), leaders,
    ]  # fmt: skip
    environment = {**os.environ, **path.environment[member.rank]}
    return run_probe(command, environment, timeout_s)


def run_probe(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Outcome:
    """Run a probe and read its lines; one that does not end in time is ended, with the stage that it had reached."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        error = None if process.returncode == 0 else _last_line(stderr) or f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        error = f"no end within {timeout_s:.0f} s"
        try:
            stdout, stderr = process.communicate(timeout=REAP_S)
        except subprocess.TimeoutExpired as late:  # what it has written so far are bytes in any case
            stdout, stderr = (str(part or b"", "utf-8", "replace") for part in (late.stdout, late.stderr))
            error += f"; the doctor waited {REAP_S:g} s more for a process that holds the output of the killed probe"
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    rates: dict[str, float] = {}
    stage = "start"
    for line in stdout.splitlines():
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        stage = said.get("stage", stage)
        if "gb_per_second" in said:
            rates[stage] = said["gb_per_second"]
    return Outcome(rates, stage, error, stderr[-2000:] if error else "")


def _last_line(text: str) -> str:
    """Return the last line that names an error: torch prints warnings after the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:300]
