"""`megarl train`: start a run on this machine, by torchrun with as many ranks as the config has trainer GPUs."""

from __future__ import annotations

import argparse
import os
import sys

from megarl.config.loading.arguments import add_run_arguments, mistake_printer, run_overrides

# Ends without torchrun's traceback, because the failed rank has reported why. Without --log-dir torchrun leaves a
# temporary directory at each start.
TORCHRUN = ("-m", "megarl.cluster.torchrun.run", "--rdzv-backend", "megarl", "--log-dir", os.devnull)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `train` to the `megarl` command."""
    parser = commands.add_parser(
        "train",
        help="start a run on this machine: torchrun with as many ranks as the config has trainer GPUs",
        description="Check the config, then start torchrun with `trainer.gpus` ranks, which start the rollout pool. "
        "Same as torchrun --rdzv-backend megarl with examples/rl/train_rl.py. For several machines use megarl "
        "launch.",
        epilog="example: megarl train --config examples/rl/configs/quickstart_cpu.yaml run.steps=10",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replace this process by torchrun; in one of its ranks, or in a dry run, run the rank. Raises ConfigError."""
    if options.dry_run or "WORLD_SIZE" in os.environ:
        from megarl.run.start.main import main

        main(options.arguments)  # ends the process, except for a dry run
        return 0
    command = torchrun_command(options)
    if command is None:
        return 0
    sys.stdout.flush()
    os.execv(command[0], command)


def torchrun_command(options: argparse.Namespace) -> list[str] | None:
    """Return the command that starts all ranks. If the run has already finished, report it and return None.

    Raises ConfigError, before anything starts, for a wrong config.
    """
    from megarl.checkpoint.format.manifest import already_finished
    from megarl.cluster.nodes.topology import stop_seconds
    from megarl.common.errors import ConfigError
    from megarl.common.rundir.run_lock import refuse_claimed
    from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
    from megarl.config.derived.pools import resolve_pools
    from megarl.config.loading.load import load_config
    from megarl.config.memory_plan.plan import make_plan
    from megarl.run.start.checks import check_start, mark_checked
    from megarl.telemetry.sinks.prometheus import check_endpoint

    config = load_config(options.config, run_overrides(options))
    plan = make_plan(config)
    if (nodes := resolve_pools(config).nodes) > 1:
        raise ConfigError([f"the config needs {nodes} nodes; start it by: megarl launch --config {options.config}"])
    if (message := already_finished(config)) is not None:
        sys.stderr.write(f"megarl: {message}\n")
        return None
    if not options.force:
        refuse_claimed(config.run_dir)
    check_endpoint(config.telemetry)
    check_start(config, plan.info, mistake_printer(options)).print_start(sys.stderr)
    mark_checked(os.environ)
    os.environ[RUN_DIR_VARIABLE] = str(config.run_dir.resolve())  # torchrun's agent records what the ranks cannot
    # After a stop signal the ranks need this time to end their step and save.
    ranks = (
        "--shutdown-timeout",
        str(stop_seconds(config.launch, config.timeouts)),
        "--nproc-per-node",
        str(config.trainer.gpus),
    )
    return [sys.executable, *TORCHRUN, *ranks, "-m", "megarl", "train", *options.arguments]
