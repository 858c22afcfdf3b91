"""`megarl launch`: render the script that runs a config on a SLURM cluster or this machine, and submit or run it."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.errors import ConfigError, Findings
from megarl.common.files import replace_file
from megarl.common.rundir.run_lock import refuse_claimed

if TYPE_CHECKING:
    from megarl.config.memory_plan.plan import RunPlan
    from megarl.config.schema import Config


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launch` to the `megarl` command."""
    parser = commands.add_parser(
        "launch",
        help="start a run on a SLURM cluster or on this machine, or show the script that would",
        description="Check a config, render the script that runs it and submit (slurm) or run (local) it. With "
        "--dry-run the script goes to stdout and the plan to stderr, and nothing starts.",
    )
    from megarl.config.loading.arguments import add_all_argument, add_config_arguments, add_force_argument

    add_config_arguments(parser)
    add_force_argument(parser)
    parser.add_argument(
        "--scheduler",
        choices=["slurm", "local"],
        help="default: slurm if sbatch is on this machine, else local",
    )
    parser.add_argument(
        "--no-files",
        action="store_true",
        help="with slurm or --dry-run: model and data exist only where the run will be; do not check them or the "
        "reward",
    )
    parser.add_argument("--dry-run", action="store_true", help="print script and plan; start nothing")
    add_all_argument(parser)
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="plan for this device path (default: cuda for slurm, else this machine's)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Launch the run; return the exit status of sbatch or of the run.

    Raises ConfigError for a config that cannot run, or if sbatch is not installed.
    """
    from megarl.checkpoint.format.manifest import already_finished
    from megarl.cluster.nodes.commands import local_script, slurm_script
    from megarl.config.checks.secrets import user_environment
    from megarl.config.loading.load import load_config
    from megarl.config.memory_plan.plan_tables import print_dry_run

    config = load_config(options.config, options.overrides)
    slurm = (options.scheduler or ("slurm" if shutil.which("sbatch") else "local")) == "slurm"
    plan, found = _plan(config, options, slurm=slurm)
    user_environment(config.launch.runtime_env)
    if not options.dry_run and (message := already_finished(config)) is not None:
        sys.stderr.write(f"megarl: {message}\n")
        return 0
    if slurm and not options.no_files:
        found.add(_checked_here(config, dry_run=options.dry_run))
    if plan.pools.nodes > 1 and not slurm:
        raise ConfigError([
            f"the config needs {plan.pools.nodes} nodes: use --scheduler slurm, or launch/multinode.sh with a host list"
        ])  # fmt: skip
    arguments = [*options.overrides, *(["--force"] if options.force else [])]
    if slurm:
        script = slurm_script(config, options.config, arguments, cuda=plan.device == "cuda")
    else:
        script = local_script(config.launch, options.config, arguments)
    if options.dry_run:
        sys.stdout.write(script)
        sys.stdout.flush()
        print_dry_run(plan, config, sys.stderr, found, whole=options.all)
        return 0
    body = Path("launch", "slurm", "job.sh") if slurm else Path("launch", "local.sh")
    if not body.is_file():
        raise ConfigError([f"the script sources {body}, which is not in {Path.cwd()}: start in the repository's root"])
    if not slurm and not options.force:  # a job may be queued while another one of the same run runs
        refuse_claimed(config.run_dir)
    path = Path(config.run_dir) / "launch" / ("train.sbatch" if slurm else "local.sh")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, script.encode())  # a new file: bash may still be reading the one of a running launch
    command = ["sbatch", str(path)] if slurm else ["bash", str(path)]
    try:
        status = run_script(command)
    except FileNotFoundError:
        raise ConfigError([f"{command[0]} is not on this machine; add --dry-run to see the script"]) from None
    # sbatch has reported why. A machine may have sbatch without belonging to a cluster.
    if status and slurm and options.scheduler is None and plan.pools.nodes == 1:
        sys.stderr.write("megarl: sbatch failed; for this machine: --scheduler local\n")
    return status


def _plan(config: Config, options: argparse.Namespace, *, slurm: bool) -> tuple[RunPlan, Findings]:
    """Check the config for the place where it will run; return its plan and findings. Raises ConfigError.

    For SLURM `_checked_here` follows. A dry run for this machine checks all that `megarl train --dry-run` does.
    """
    from megarl.config.checks.sections import absent_files, detect_device
    from megarl.config.memory_plan.plan import make_plan
    from megarl.run.start.dry_run import checked_plan

    if options.dry_run and not slurm:
        return checked_plan(config, overrides=options.overrides, device=options.device, files=not options.no_files)
    plan = make_plan(config, device=options.device or ("cuda" if slurm else detect_device()), files=not slurm)
    absent = ", ".join(f"{key} ({path})" for key, path in absent_files(config)) if options.dry_run else ""
    note = f"not on this machine, so not checked, but needed where the run starts: {absent}"
    return plan, Findings(notes=[note] if absent else [])


def _checked_here(config: Config, *, dry_run: bool) -> Findings:
    """Check data files and rewards, so that no job waits in a queue for nothing. The job checks the rest.

    Return the findings; in a dry run an absent file is only a note. Raises ConfigError that lists every problem.
    """
    from megarl.config.checks.sections import absent_files
    from megarl.run.start.dry_run import elsewhere_findings

    found = Findings()
    if not dry_run:
        here = "(--no-files if only the nodes have it; relative paths start at the current directory)"
        found.problems += [f"{key}: no such file or directory: {path} {here}" for key, path in absent_files(config)]
    found.add(elsewhere_findings(config))
    found.refuse()
    if not dry_run:
        sys.stderr.writelines(f"megarl: warning: {warning}\n" for warning in found.warnings)
    return found


def run_script(command: list[str]) -> int:
    """Submit a job and return the status of sbatch; or replace this process by the script, which handles signals."""
    if command[0] == "sbatch":
        return subprocess.run(command, check=False).returncode
    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the script would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], command)
