"""The two steps of a launch script on the first node: `prepare` before anything starts, `status` after the end.

`prepare` checks config, plan and allocation, reserves the run directory and writes what all nodes need to
RUN_DIR/launch/ID. `status` reports how the run ended.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.cluster.nodes.commands import ENTRY
from megarl.cluster.nodes.node_files import NodeBoard
from megarl.cluster.nodes.spec import LaunchSpec, launch_directory
from megarl.cluster.nodes.topology import Topology, make_topology, stop_seconds
from megarl.common.errors import ConfigError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.run_lock import Holder, RunClaim, claim, other_holder
from megarl.config.checks.secrets import user_environment
from megarl.config.checks.sections import detect_device
from megarl.config.derived.hardware import local_gpus
from megarl.config.loading.load import to_yaml
from megarl.config.memory_plan.plan import make_plan
from megarl.config.schema import Config
from megarl.config.schema.job import LaunchConfig, TimeoutsConfig

QUERY_S = 60  # for SLURM's answer to a query

LaunchEnd = Literal["finished", "preempted", "unsaved", "failed"]


@dataclass(frozen=True)
class Allocation:
    """The job's allocation. `seconds`: time left until the limit; `signal_s`: how long before it the batch script gets
    its signal. These and `gpus_per_node` are None if unknown or unlimited.
    """

    hosts: tuple[str, ...]
    gpus_per_node: int | None
    seconds: int | None
    signal_s: int | None = None


def slurm_allocation(environment: Mapping[str, str], signal_s: int | None = None) -> Allocation:
    """Return the allocation of this batch job. Raises ConfigError outside a job, or if SLURM does not answer."""
    if "SLURM_JOB_ID" not in environment or "SLURM_JOB_NODELIST" not in environment:
        raise ConfigError(["not inside a SLURM job: submit the script with sbatch, or use --scheduler local"])
    hosts = _query("scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]).split()
    left = _query("squeue", "--noheader", "--job", environment["SLURM_JOB_ID"], "--format", "%L").strip()
    gpus = environment.get("SLURM_GPUS_ON_NODE")
    return Allocation(tuple(hosts), int(gpus) if gpus is not None else None, parse_duration(left), signal_s)


def local_allocation(hosts: tuple[str, ...]) -> Allocation:
    """Return this machine, or a list of `hosts` that have as many GPUs as this machine, as an allocation."""
    return Allocation(hosts, len(local_gpus()), None)


def _query(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise ConfigError([f"{' '.join(command)}: {detail}"]) from None


def parse_duration(text: str) -> int | None:
    """Convert SLURM's `[D-]HH:MM:SS` or `MM:SS` to seconds; None for UNLIMITED, INVALID and NOT_SET."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_allocation(
    launch: LaunchConfig, timeouts: TimeoutsConfig, topology: Topology, allocation: Allocation, *, cuda: bool
) -> None:
    """Raise ConfigError listing everything that does not fit."""
    problems = []
    wanted = len(topology.nodes)
    if len(allocation.hosts) != wanted:
        roles = ", ".join(f"{count} {role}" for role, count in _roles(topology).items())
        problems.append(
            f"nodes: the job has {len(allocation.hosts)} ({', '.join(allocation.hosts)}), the config needs {wanted} "
            f"({roles}); ask for --nodes={wanted}"
        )
    if cuda and allocation.gpus_per_node is not None and allocation.gpus_per_node < topology.node_gpus:
        problems.append(
            f"GPUs per node: the job has {allocation.gpus_per_node}, the config uses devices up to "
            f"{topology.node_gpus - 1}; ask for --gpus-per-node={topology.node_gpus}"
        )
    problems += _time_problems(launch, timeouts, allocation)
    if problems:
        raise ConfigError([f"the allocation does not fit the config: {problem}" for problem in problems])


def _time_problems(launch: LaunchConfig, timeouts: TimeoutsConfig, allocation: Allocation) -> list[str]:
    """Return a message for each reason why the remaining time is too short."""
    if allocation.seconds is None:
        return []
    problems = []
    stop = stop_seconds(launch, timeouts)
    if allocation.seconds <= stop:
        problems.append(
            f"time: {allocation.seconds} s are left, but a run is asked to stop {stop} s before the limit "
            "(launch.stop_before_s): it would stop before its first step; ask for a longer --time"
        )
    if allocation.signal_s is not None and allocation.signal_s < stop:
        problems.append(
            f"time: the script gets its signal {allocation.signal_s} s before the limit, but ending a step and saving "
            f"may take {stop} s (launch.stop_before_s): use the script of megarl launch, or submit with "
            f"MEGARL_SIGNAL_S={stop} and --signal=B:USR1@{stop}"
        )
    limit = launch.time_limit
    wanted = parse_duration(limit) or 0 if limit is not None else 0
    # Some of the time has passed since the job started: tolerate 300 s, or a tenth of the limit.
    if allocation.seconds < wanted - max(300, wanted // 10):
        problems.append(
            f"time: {allocation.seconds} s are left, launch.time_limit is {limit}; ask for --time={limit} or lower "
            "launch.time_limit"
        )
    return problems


def _roles(topology: Topology) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in topology.nodes:
        role = node.role.removesuffix(" + supervisor")
        counts[role] = counts.get(role, 0) + 1
    return counts


def prepare(
    config: Config, allocation: Allocation, launch_id: str, *, entry: str = ENTRY, force: bool = False
) -> LaunchSpec:
    """Check everything, then write the launch file and remove what an earlier launch left.

    `force`: take the run directory even if another run holds it.

    Raises ConfigError that lists the problems of config, files and allocation, or names the launch that is using the
    run directory. Nothing is written then.
    """
    cuda = detect_device() == "cuda"
    make_plan(config)
    user_environment(config.launch.runtime_env)
    if not Path(entry).is_file():
        raise ConfigError([f"{Path.cwd() / entry} does not exist: start from the repository's root"])
    topology = make_topology(config)
    check_allocation(config.launch, config.timeouts, topology, allocation, cuda=cuda)
    # The holder is the launch script, until the first node's agent takes over.
    script = Holder.here("megarl launch", ProcessId.of(os.getppid()), launch_id)
    node_s = config.timeouts.node_s
    claim(config.run_dir, script, node_s, lambda text: sys.stderr.write(f"megarl: {text}\n"), force=force)
    directory = launch_directory(config.run_dir, launch_id)
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    previous = _previous(config.run_dir)
    spec = LaunchSpec(
        launch_id=launch_id,
        config_json=config.model_dump_json(),
        directory=str(directory),
        cwd=os.getcwd(),
        cuda=cuda,
        hosts=allocation.hosts,
        entry=entry,
        steps_before=previous.step if previous is not None and previous.status == "preempted" else 0,
    )
    spec.save()
    run_files.forget(config.run_dir)
    (config.run_dir / "error.txt").unlink(missing_ok=True)
    return spec


def status(spec: LaunchSpec) -> tuple[LaunchEnd, str]:
    """Return how the launch ended, and one line for the user; release its claim on the run directory. Writes exit.json
    if no process of the run could. "unsaved": it was stopped without saving its last steps. A launch that was stopped
    before it saved a step of its own counts as failed: requeued, it would never make progress.
    """
    try:
        return _status(spec)
    finally:
        RunClaim(spec.run_dir, Holder.here("megarl launch", ProcessId.own(), spec.launch_id)).release()


def _previous(run_dir: Path) -> run_files.ExitRecord | None:
    """Return the exit record of the previous launch and remove it; None if there is no readable one."""
    try:
        return run_files.read_exit(run_dir)
    except run_files.ExitRecordError:
        return None


def _status(spec: LaunchSpec) -> tuple[LaunchEnd, str]:
    failure = NodeBoard(Path(spec.directory)).failure()
    other = other_holder(spec.run_dir, Holder.here("megarl launch", ProcessId.own(), spec.launch_id))
    if other is not None:  # exit.json is that run's
        why = f"node {failure.node} failed: {failure.reason}" if failure is not None else "this launch has ended"
        return "failed", f"{why}; {spec.run_dir} is now held by {other.describe()}"
    try:
        record = run_files.read_exit(spec.run_dir)
    except run_files.ExitRecordError as error:  # not restarted: the run may have finished
        return "failed", str(error)
    if record is not None and record.status != "failed":
        after = f"after {record.step} of {spec.config.run.steps} steps"
        why = f": {record.reason}" if record.reason else ""
        if record.status == "preempted" and record.step <= spec.steps_before:
            return "failed", f"stopped {after}{why}; no step of this launch is saved, so it is not restarted"
        if record.unsaved_steps:
            lost = f"{record.unsaved_steps} more were trained and are lost{why}"
            return "unsaved", f"stopped {after}; {lost}; the same command resumes after step {record.step}"
        return record.status, f"{record.status} {after}{why}"
    reason = f"the job was killed before it could report a reason; see {spec.run_dir / 'logs'}"
    if failure is not None:
        reason = f"node {failure.node} failed: {failure.reason}"
    elif record is not None:
        reason = record.reason
    if record is None:
        run_files.write_exit(spec.run_dir, run_files.ExitRecord("failed", spec.steps_before, reason))
    return "failed", reason
