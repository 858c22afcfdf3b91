"""A trainer rank from its command line to its exit code.

A user's mistake ends with one message and exit code 2 before anything starts. A failure of the run ends with one
message (of the first rank that failed), exit code 1 and "failed" in RUN_DIR/summary.json and RUN_DIR/exit.json. A run
that stops on request (megarl/common/rundir/run_files.py) exits with 0 if it saved its last step. If it could not, it
exits with 1, or with 0 while torchrun (--max-restarts) would restart the ranks for another code. RUN_DIR/exit.json has
the reason and the saved step. A run that has trained all steps but could not save the last one has failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from megarl.checkpoint.format.manifest import already_finished
from megarl.checkpoint.save.directory import continues_history
from megarl.checkpoint.save.resume_point import config_of_this_start
from megarl.common.errors import ConfigError
from megarl.common.process.memory_tuning import begin_start, use_huge_pages
from megarl.common.process.output import redirect_output
from megarl.common.rundir import run_files
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, RunClaim
from megarl.common.values import GIB
from megarl.config.derived.staleness import pace_of
from megarl.config.loading.arguments import add_run_arguments, mistake_printer, run_overrides
from megarl.config.loading.load import load_config, to_yaml
from megarl.config.memory_plan.plan import RunPlan, make_plan
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.config.schema import Config
from megarl.config.schema.job import TimeoutsConfig
from megarl.run.loop.stop import StopSignals, end_before_start
from megarl.run.ranks.failure import FailureReport, report_and_close, set_aside
from megarl.run.record.events import begin_events, end_with_failure
from megarl.run.start.checks import check_start, is_checked
from megarl.run.start.dry_run import dry_run
from megarl.run.start.torchrun_hints import (
    SAFE_TORCHRUN,
    claim_for_ranks,
    holder_for_ranks,
    is_restart,
    notice_of_open_stores,
    refuse_open_stores,
)
from megarl.telemetry.sinks.prometheus import check_endpoint
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from megarl.cluster.pool.pool_process import SupervisorHandle

RANK_0_EXITS_S = 20.0
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # in bytes, with cgroups v2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a trainer rank; the entry point of `examples/rl/train_rl.py`.

    Ends the process, except after a dry run or if the run had already finished.
    """
    options = _parser().parse_intermixed_args(arguments)
    begin_start()
    rank, restarted = int(os.environ.get("RANK", "0")), is_restart(os.environ)
    end_before_start(speaks=_reports_signals(rank))
    try:
        overrides = run_overrides(options)
        config = load_config(options.config, overrides)
        if options.dry_run:
            dry_run(config, sys.stdout, overrides=overrides, report=mistake_printer(options), whole=options.all)
            return
        plan = make_plan(config)
        _check_launch(plan.pools.nodes, config.trainer.gpus, config.run_dir)
        if plan.shared is not None:
            _check_host_memory(plan.shared, int(os.environ["LOCAL_WORLD_SIZE"]))
        if not restarted and (message := already_finished(config)) is not None:
            if rank == 0:
                sys.stderr.write(f"megarl: {message}\n")
            return
        if rank == 0 and not restarted:
            check_endpoint(config.telemetry)
            if not is_checked(os.environ):  # by `megarl train`
                check_start(config, plan.info, mistake_printer(options)).print_start(sys.stderr)
        claim = claim_for_ranks(config.run_dir, config.timeouts.node_s, rank, force=options.force and not restarted)
    except (ConfigError, ValueError, FileNotFoundError, TimeoutError) as error:
        if rank != 0:
            # Rank 0 reports the mistake. torchrun ends all ranks when the first one exits, so rank 0 must exit first.
            time.sleep(RANK_0_EXITS_S)
            sys.exit(2)
        sys.stderr.write(f"megarl: {error}\n")
        sys.exit(2)
    if rank == 0 and (notice := notice_of_open_stores(os.environ, sys.argv)) is not None:
        sys.stderr.write(f"megarl: {notice}\n")
    sys.exit(run(config, plan, claim))


def _reports_signals(rank: int) -> bool:
    """Return whether this rank reports stop signals: rank 0 does, unless a launch script started it.

    Then the script and the node's agent, which send the signals to ranks, report and record them.
    """
    return rank == 0 and LAUNCH_ID_VARIABLE not in os.environ


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Reinforcement learning of a language model: Megatron-Core trainer, vLLM rollout pool.",
        epilog=f"example: {SAFE_TORCHRUN} --nproc-per-node 2 examples/rl/train_rl.py "
        "--config examples/rl/configs/quickstart_cpu.yaml run.steps=10",
    )
    add_run_arguments(parser)
    return parser


def _check_launch(nodes: int, gpus: int, run_dir: Path) -> None:
    """Raise ValueError unless this many nodes and ranks were started, by a torchrun that is closed to strangers."""
    if nodes > 1 and LAUNCH_ID_VARIABLE not in os.environ:
        raise ValueError(
            f"the config needs {nodes} nodes, which a bare torchrun does not start: use `megarl launch`, "
            "launch/slurm/train.sbatch or launch/multinode.sh"
        )
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        raise ValueError(
            f"not started by torchrun; use: {SAFE_TORCHRUN} --nproc-per-node {gpus} {sys.argv[0]} "
            "--config ..., or add --dry-run to see the plan"
        )
    if int(world) != gpus:
        raise ValueError(
            f"torchrun started {world} ranks, but trainer.gpus is {gpus}: use --nproc-per-node {gpus} "
            f"or set trainer.gpus={world}"
        )
    refuse_open_stores(os.environ, sys.argv, run_dir)


def _check_host_memory(shared: SharedMemory, ranks: int) -> None:
    """Raise ValueError unless this host, or its container, has memory for the state that its ranks park."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int(CONTAINER_LIMIT.read_text()))
    if (needed := shared.host * ranks) > total:
        message = (
            f"rollout.share_gpus: {ranks} parked ranks keep {needed / GIB:.1f} GiB in host memory, and "
            f"{os.uname().nodename} has {total / GIB:.1f} GiB: use more nodes, or separate GPUs"
        )
        if os.environ["RANK"] != "0" == os.environ["LOCAL_RANK"]:  # rank 0 may have more
            sys.stderr.write(f"megarl: {message}\n")
        raise ValueError(message)


def run(config: Config, plan: RunPlan, claim: RunClaim | None = None) -> int:
    """Train as this rank; return 0, or end the process with 1. `claim`: that on RUN_DIR, if this rank holds it."""
    rank = int(os.environ["RANK"])
    log_file = config.run_dir / "logs" / f"trainer-rank-{rank}.log"
    failures = FailureReport(config.run_dir, rank, holder_for_ranks())
    terminal: TextIO = sys.stderr
    try:
        terminal = redirect_output(log_file)
        code = _run(config, plan, claim, terminal, lambda error: failures.claim(error, terminal, log_file))
    except Exception as error:
        try:
            failures.claim(error, terminal, log_file)
            end_with_failure(error, restarts=_restarts_left())
            if claim is not None and not _restarts_left():
                claim.release()
        finally:
            # Not sys.exit, which could hang: peers may be waiting in a collective that this rank has left.
            os._exit(1)
    if claim is not None:
        claim.release()
    return code


def _run(
    config: Config, plan: RunPlan, claim: RunClaim | None, terminal: TextIO, report: Callable[[Exception], object]
) -> int:
    """Take RUN_DIR over and train; return the exit code. Raises the error that ends the run.

    `report`: reports a failure to the user, once.
    """
    if claim is not None:
        claim.renew_in_background(lambda other: _end_without_a_trace(other, config.run_dir, terminal))
    this_start = config_of_this_start(plan.config)
    if int(os.environ["RANK"]) == 0:
        if (moved := _take_over(this_start)) is not None:
            terminal.write(f"megarl: the results of an earlier run in {config.run_dir} are moved to {moved}\n")
        (config.run_dir / "config.yaml").write_text(to_yaml(plan.config), encoding="utf-8")  # read by `megarl replay`
    code = _train(config, this_start, plan, terminal, report)
    (config.run_dir / run_files.RESERVE_FILE).unlink(missing_ok=True)
    return code


def _end_without_a_trace(other: Holder, run_dir: Path, terminal: TextIO) -> None:
    """End this rank, and leave RUN_DIR to the run that took it."""
    terminal.write(
        f"megarl: {run_dir} was taken by {other.describe()}, because this run was silent or by --force; this run ends\n"
    )
    terminal.flush()
    os._exit(1)


def _take_over(config: Config) -> Path | None:
    """Move the results of an earlier run aside, unless this run continues it, and remove its exit record.

    Return the directory to which they are moved; None if there are none.
    """
    moved = None
    if continues_history(config.checkpoint_dir, config.checkpoint.resume):
        (config.run_dir / "error.txt").unlink(missing_ok=True)
    else:
        moved = set_aside(config.run_dir)
    if is_restart(os.environ) or LAUNCH_ID_VARIABLE in os.environ:
        # A stop request that exists is for this run: torchrun has restarted it, or its launch script has checked.
        (config.run_dir / run_files.EXIT_FILE).unlink(missing_ok=True)
    else:
        run_files.forget(config.run_dir)
    run_files.make_reserve(config.run_dir)
    return moved


def _train(
    config: Config, this_start: Config, plan: RunPlan, terminal: TextIO, report: Callable[[Exception], object]
) -> int:
    """Build the session and train. Return 0; 1 if the run was stopped, could not save there and is not restarted.

    `this_start`: the config of this start of the ranks, without `auto`. The pool gets the launch's `config`, so
    restarted ranks find it unchanged and keep the pool. `report`: as in `_run`.
    """
    from megarl.cluster.nodes.topology import stop_seconds
    from megarl.cluster.pool.network import one_node_environment
    from megarl.cluster.torchrun.rendezvous import request_seconds_to_stop
    from megarl.common.process.processes import die_with_parent

    die_with_parent()
    os.environ.update(one_node_environment(config.ray))
    rank = int(os.environ["RANK"])
    signals = StopSignals(
        config.run_dir, config.checkpoint_dir, terminal, speaks=_reports_signals(rank), mine=holder_for_ranks()
    )
    signals.install()
    launch = _launch_pool(config.model_dump_json(), config.run_dir, config.timeouts) if rank == 0 else None
    from megarl import platforms
    from megarl.run.ranks.control_group import join_peers
    from megarl.run.ranks.watch import watch_ranks

    own = _own_device(plan, int(os.environ["LOCAL_RANK"]))
    # Engines on the rank's own GPU map the buffers of its weights.
    platform = platforms.activate(own, expandable=not config.rollout.share_gpus)
    import torch

    if not platform.is_cuda:
        use_huge_pages()
    store = join_peers(platform.backend, config.timeouts.collective_s, config.run_dir)
    if rank == 0:
        request_seconds_to_stop(os.environ, stop_seconds(config.launch, config.timeouts), config.timeouts.collective_s)
    # After rank 0 has moved those of an earlier run aside.
    begin_events(config.run_dir, rank, config.telemetry.events_mib)
    if rank == 0:
        device = torch.cuda.get_device_name() if platform.is_cuda else "cpu"
        run_files.write_start(config.run_dir, device)
    watch = watch_ranks(store, config.run_dir, config.timeouts, report)
    if rank == 0:
        terminal.write(f"megarl: {config.run.name}: {_headline(plan)}\n")
    from megarl.run.loop.loop import train
    from megarl.run.loop.session import Session

    session = Session(this_start, launch, terminal, signals, plan.shared)
    watch.follow(lambda: session.steps_done)
    try:
        train(session)
        session.finish()
    except BaseException as error:
        session.recorder.show_notices()  # they may name the cause
        report_and_close(error, report, partial(session.close, keep_pool=_restarts_left()))
        raise
    session.close()
    events.close_events()
    watch.close()
    torch.distributed.destroy_process_group()
    # torchrun might restart the ranks after another code; a stopped run must stay stopped.
    return 1 if session.lost_its_stop and not _restarts_left() else 0


def _own_device(plan: RunPlan, local_rank: int) -> int:
    """Return the index of this rank's GPU among the visible ones. A node's agent shows its ranks only the trainer's."""
    return local_rank if LAUNCH_ID_VARIABLE in os.environ else plan.pools.trainer.devices[local_rank]


def _restarts_left() -> bool:
    """Return whether torchrun (--max-restarts) will start the ranks again, which then continue with the same pool."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most


def _headline(plan: RunPlan) -> str:
    layout = plan.layout
    parts = [f"TP {layout.tensor}", f"PP {layout.pipeline}", f"EP {layout.expert}", f"DP {layout.data}"]
    parts += [f"CP {layout.context}"] if layout.context > 1 else []
    engines = f"{plan.replicas} vLLM engine{'s' * (plan.replicas > 1)} (TP {plan.engine_gpus})"
    return (
        f"{plan.parameters / 1e6:.3g} M parameters on {plan.device}, trainer {' x '.join(parts)}, {engines}, "
        f"{plan.groups_per_step} x {plan.samples_per_step // plan.groups_per_step} samples per step, "
        f"{pace_of(plan.config)}; "
        f"logs in {plan.config.run_dir / 'logs'}"
    )


def _launch_pool(config_json: str, run_dir: Path, timeouts: TimeoutsConfig) -> Future[SupervisorHandle]:
    """Start the supervisor in a thread while the policy is built, because engines take longest to start.

    If a node's agent has started the ranks, attach to the supervisor that an agent has started instead.
    """
    from megarl.cluster.pool.pool_process import attach_supervisor, launch_supervisor
    from megarl.config.checks.sections import detect_device

    executor = ThreadPoolExecutor(1, thread_name_prefix="launch-supervisor")
    if (launch_id := os.environ.get(LAUNCH_ID_VARIABLE)) is not None:
        return executor.submit(attach_supervisor, run_dir, launch_id, timeouts.ray_start_s + timeouts.node_s)
    agent = os.getppid()  # torchrun's agent
    return executor.submit(launch_supervisor, config_json, run_dir, agent, cuda=detect_device() == "cuda")
