"""`python -m megarl.cluster.nodes prepare|status|fail|environment`: the commands that launch scripts call.

Users call `megarl launch`.
"""

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from megarl.checkpoint.format.manifest import already_finished
from megarl.cluster.nodes.commands import ENTRY, exports
from megarl.cluster.nodes.launcher import can_lose
from megarl.cluster.nodes.node_files import NodeBoard, NodeFailure
from megarl.cluster.nodes.prepare import local_allocation, prepare, slurm_allocation, status
from megarl.cluster.nodes.spec import LaunchSpec
from megarl.common.errors import ConfigError
from megarl.common.rundir.notices import write_notice
from megarl.config.checks.secrets import referenced_variables
from megarl.config.loading.arguments import add_config_arguments, add_force_argument
from megarl.config.loading.load import load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a mistake of the user, reported in one message."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"megarl: {error}\n")
        return 2
    except KeyboardInterrupt:
        if options.run is _prepare:
            sys.stderr.write("megarl: interrupted before anything was started; the same command starts the run\n")
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megarl.cluster.nodes", description="Called by the launch scripts.")
    commands = parser.add_subparsers(required=True)
    before = commands.add_parser(
        "prepare",
        help="check config and allocation; print the path of the launch file, or nothing if the run has finished",
    )
    add_config_arguments(before)
    before.add_argument("--scheduler", choices=["slurm", "local"], required=True)
    before.add_argument("--hosts", help="comma-separated, for --scheduler local on several machines")
    before.add_argument("--signal-s", type=int, help="seconds before the time limit at which SLURM signals the script")
    add_force_argument(before)
    before.add_argument("--entry", default=ENTRY, help=argparse.SUPPRESS)
    before.set_defaults(run=_prepare)
    after = commands.add_parser(
        "status", help="print finished, preempted, unsaved or failed; the reason goes to stderr"
    )
    after.add_argument("launch", type=Path)
    after.set_defaults(run=_status)
    failed = commands.add_parser("fail", help="end the job, naming a node that the script could not start")
    failed.add_argument("launch", type=Path)
    failed.add_argument("host")
    failed.add_argument("reason")
    failed.set_defaults(run=_fail)
    passed = commands.add_parser("environment", help="print shell commands that set what the agents of hosts need")
    passed.add_argument("launch", type=Path)
    passed.set_defaults(run=_environment)
    return parser


def _prepare(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    if (finished := already_finished(config)) is not None:
        sys.stderr.write(f"megarl: {finished}\n")
        return 0
    force = options.force
    if options.scheduler == "slurm":
        # A requeued job must not end the run that was started in its place.
        force = force and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
        allocation = slurm_allocation(os.environ, options.signal_s)
        launch_id = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    else:
        allocation = local_allocation(tuple((options.hosts or "127.0.0.1").split(",")))
        launch_id = uuid.uuid4().hex[:8]
    spec = prepare(config, allocation, launch_id, entry=options.entry, force=force)
    sys.stdout.write(f"{spec.path}\n")
    return 0


def _status(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run has ended: its status is the script's exit code
    word, text = status(LaunchSpec.load(options.launch))
    sys.stderr.write(f"megarl: {text}\n")
    sys.stdout.write(f"{word}\n")
    return 0


def _fail(options: argparse.Namespace) -> int:
    launch = LaunchSpec.load(options.launch)
    if options.host in launch.hosts and can_lose(launch, launch.hosts.index(options.host)):
        write_notice(launch.run_dir, f"node {options.host} is lost: {options.reason}; the run continues")
        return 0
    NodeBoard(options.launch.parent).claim_failure(NodeFailure(options.host, options.reason))
    return 0


def _environment(options: argparse.Namespace) -> int:
    referenced = referenced_variables(LaunchSpec.load(options.launch).config)
    sys.stdout.write(exports(referenced, os.environ))
    return 0


if __name__ == "__main__":
    sys.exit(main())
