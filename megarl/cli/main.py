"""The `megarl` command. Each subcommand is a small function that alone imports the heavy modules it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from megarl.cli import evaluate as standalone
from megarl.cli import launch, pool, replay, serve, trace, train
from megarl.cli import report as run_report
from megarl.cli.top import command as top
from megarl.common.errors import ConfigError
from megarl.config.loading.arguments import (
    add_all_argument,
    add_config_arguments,
    add_mistakes_argument,
    mistake_printer,
)

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 2 for a user's mistake, reported in one message."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["convert"]:  # it parses what follows itself, --help included
        from megarl.checkpoint.convert.cli import main as convert

        return convert(given[1:], program="megarl convert", of_torchrun="-m megarl convert")
    if not given:
        build_parser().print_help(sys.stderr)
        return 2
    options = _parse(given)
    options.arguments = given[1:]
    command: Command = options.run
    try:
        return command(options)
    except (ConfigError, FileNotFoundError) as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun (megarl replay) every rank gets the same error
            sys.stderr.write(f"megarl: {error}\n")
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("megarl: interrupted; the same command starts again or resumes from the last save\n")
        return 130


def _parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Accepts overrides before and after options; argparse accepts only one group of them."""
    parser = build_parser()
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any("=" not in each or each[0] == "-" for each in rest)):
        fix = "; set a key of the config as section.key=value, without dashes" if hasattr(options, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{fix}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="megarl",
        description="Reinforcement learning of language models: Megatron-Core trainer, vLLM rollout pool.",
        epilog="Start a run on one machine with `megarl train --config C`, which is "
        "torchrun --rdzv-backend megarl --nproc-per-node N examples/rl/train_rl.py --config C; "
        "on several machines with `megarl launch`.",
    )
    parser.add_argument("--version", action="version", version=f"megarl {version('megarl')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_doctor(commands)
    train.add_parser(commands)
    launch.add_parser(commands)
    standalone.add_parser(commands)
    serve.add_parser(commands)
    replay.add_parser(commands)
    commands.add_parser("convert", help="convert, compare and inspect Hugging Face and Megatron-Core checkpoints")
    pool.add_parser(commands)
    trace.add_parser(commands)
    run_report.add_parser(commands)
    top.add_parser(commands)
    return parser


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser(
        "plan",
        help="check a config and print it resolved, with ranks, devices and memory; start nothing",
        description="Check a config and print it resolved, with its plan: ranks, layout, replicas, devices, samples "
        "per step, memory per GPU. Nothing starts. With exit status 2 every problem is listed with its key and fix.",
    )
    add_config_arguments(plan)
    plan.add_argument("--device", choices=["cuda", "cpu"], help="plan for this device path (default: this machine's)")
    plan.add_argument(
        "--no-files",
        action="store_true",
        help="do not look for data, weights and tokenizer here (model.path's config.json is still read)",
    )
    add_all_argument(plan)
    add_mistakes_argument(plan)
    plan.set_defaults(run=_plan)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="show what is installed, which device path a run would use and what is missing",
        description="Compare the installed packages with the lock file; show which device path a run would use, and "
        "this machine's limits and memory. Exit status 1 if a run, or the run of --config, could not start.",
    )
    doctor.add_argument("--config", type=Path, help="a config: fail if it needs the sandbox and this machine has none")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="with --config: overrides of its keys")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.add_argument(
        "--installation",
        action="store_true",
        help="check only packages and imports, for a node without GPUs or an image build",
    )
    doctor.add_argument(
        "--nodes",
        action="store_true",
        help="under torchrun, one process per node or GPU: measure every path between the nodes instead",
    )
    doctor.add_argument("--interface", help="with --nodes: the network interface of a run, as launch.interface")
    doctor.add_argument("--mib", type=float, default=64, help="with --nodes: MiB per message (default: %(default)s)")
    doctor.add_argument("--timeout", type=float, default=120, help="with --nodes: s per path (default: %(default)s)")
    doctor.set_defaults(run=_doctor)


def _plan(options: argparse.Namespace) -> int:
    from megarl.config.loading.load import load_config
    from megarl.run.start.dry_run import dry_run

    config = load_config(options.config, options.overrides)
    dry_run(
        config,
        sys.stdout,
        overrides=options.overrides,
        device=options.device,
        files=not options.no_files,
        report=mistake_printer(options),
        whole=options.all,
    )
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from megarl.cli.doctor.examine import examine
    from megarl.cli.doctor.report import render

    if options.nodes:
        from megarl.cli.doctor.between_nodes import try_nodes

        return try_nodes(
            interface=options.interface, mib=options.mib, timeout_s=options.timeout, as_json=options.json,
            write=sys.stdout.write,
        )  # fmt: skip
    report = examine(installation_only=options.installation, sandbox_users=_sandbox_users(options))
    sys.stdout.write(report.to_json() if options.json else render(report))
    return 0 if report.can_start else 1


def _sandbox_users(options: argparse.Namespace) -> list[str]:
    from megarl.config.checks.agent import sandbox_users
    from megarl.config.loading.load import load_config

    if options.config is not None and options.installation:
        raise ConfigError(["doctor --installation does not examine this machine, but --config needs that: drop one"])
    if options.config is None and options.overrides:
        raise ConfigError([f"{options.overrides[0]} changes a config, but doctor has none: add --config FILE"])
    return [] if options.config is None else sandbox_users(load_config(options.config, options.overrides))
