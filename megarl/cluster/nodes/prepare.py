"""The two steps of a launch script on the first node: `prepare` before anything starts, `status` after the end.

`prepare` checks config, plan and allocation, reserves the run directory and writes what all nodes need to
RUN_DIR/launch/ID. `status` reports how the run ended.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

from megarl.cluster.nodes.allocation import Allocation, check_allocation
from megarl.cluster.nodes.commands import ENTRY, user_environment
from megarl.cluster.nodes.launcher import BEAT_S
from megarl.cluster.nodes.node_files import NodeBoard
from megarl.cluster.nodes.spec import LAUNCH_FILE, LaunchSpec, launch_directory
from megarl.cluster.nodes.topology import make_topology
from megarl.common.errors import ConfigError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.run_lock import Holder, RunClaim, claim, other_holder
from megarl.config.checks.sections import detect_device
from megarl.config.loading.load import to_yaml
from megarl.config.memory_plan.plan import make_plan
from megarl.config.schema import Config

CURRENT_FILE = "current"

LaunchEnd = Literal["finished", "preempted", "unsaved", "failed"]


def prepare(
    config: Config, allocation: Allocation, launch_id: str, *, entry: str = ENTRY, force: bool = False
) -> LaunchSpec:
    """Check everything, then write the launch file and remove what an earlier launch left.

    `force`: take the run directory even if another run holds it.

    Raises ConfigError listing what is wrong with config, files or allocation, or naming the launch that is using the
    run directory. Nothing is written then.
    """
    cuda = detect_device() == "cuda"
    make_plan(config)
    user_environment(config.launch)
    if not Path(entry).is_file():
        raise ConfigError([f"{Path.cwd() / entry} does not exist: start from the repository's root"])
    topology = make_topology(config)
    check_allocation(config, topology, allocation, cuda=cuda)
    if not force:
        refuse_running(config.run_dir)
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
    (directory.parent / CURRENT_FILE).write_text(launch_id)
    run_files.forget(config.run_dir)
    (config.run_dir / "error.txt").unlink(missing_ok=True)
    return spec


def refuse_running(run_dir: Path, pause_s: float = 2 * BEAT_S) -> None:
    """Raise ConfigError if the last launch in `run_dir` is still running: a node's counter increases in `pause_s`."""
    current = run_dir / "launch" / CURRENT_FILE
    if not current.is_file():
        return
    spec_file = launch_directory(run_dir, current.read_text()) / LAUNCH_FILE
    if not spec_file.is_file():
        return
    spec = LaunchSpec.load(spec_file)
    board = NodeBoard(Path(spec.directory))
    before = [board.read(node.index) for node in spec.topology.nodes]
    if not any(record is not None and record.state == "running" for record in before):
        return
    time.sleep(pause_s)
    for old in before:
        new = board.read(old.index) if old is not None else None
        if old is not None and new is not None and new.state == "running" and new.beat != old.beat:
            raise ConfigError([
                f"run.dir: {run_dir} is in use by launch {spec.launch_id} (node {new.host} is running); end that run "
                "or choose another run.dir"
            ])  # fmt: skip


def status(spec: LaunchSpec) -> tuple[LaunchEnd, str]:
    """Return how the launch ended, and one line for the user; give up its claim on the run directory.

    Writes exit.json if no process of the run could. "unsaved": it was stopped, and its last steps could not be saved.

    A launch that was stopped before it saved a step of its own counts as failed: requeued, it would never get further.
    """
    try:
        return _status(spec)
    finally:
        RunClaim(spec.run_dir, Holder.here("megarl launch", ProcessId.own(), spec.launch_id)).release()


def _previous(run_dir: Path) -> run_files.ExitRecord | None:
    """Return the exit record of the launch before; None if it left none that can be read. It is removed afterwards."""
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
    except run_files.ExitRecordError as error:  # not started again: the run may have finished
        return "failed", str(error)
    if record is not None and record.status != "failed":
        after = f"after {record.step} of {spec.config.run.steps} steps"
        why = f": {record.reason}" if record.reason else ""
        if record.status == "preempted" and record.step <= spec.steps_before:
            return "failed", f"stopped {after}{why}; no step of this launch is saved, so it is not started again"
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
