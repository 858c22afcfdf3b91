"""`megarl replay`: train on the batches that a run recorded (`telemetry.dump_batches`), without a pool, Ray or vLLM.

It uses the plan and the step of the training loop on the recorded trajectories; only what the user overrides differs
(learning rate, loss, layout, number of ranks, ...). Training starts from `model.path`, so a replay from the first step
repeats the run. Or it starts from a checkpoint, with the step after it. Old log-probs are those of the recorded engine.

    megarl replay --run-dir runs/quickstart trainer.gpus=1 trainer.parallel.tensor=1
    torchrun --rdzv-backend megarl --nproc-per-node 2 -m megarl replay --run-dir runs/quickstart --steps 5
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from megarl.cli.standalone import CTRL_C, interrupted_once
from megarl.common.errors import ConfigError
from megarl.common.rundir.json_lines import read_json_lines
from megarl.common.trust.object_collectives import TEXT
from megarl.config.derived.datasets import train_sets
from megarl.config.derived.staleness import refill_groups
from megarl.queue.dump import DumpedBatch, DumpError, read_batch, read_images, recorded_steps
from megarl.rollout.admission.admission_log import SCHEDULE_FILE

if TYPE_CHECKING:
    from megarl.common.rundir.run_lock import RunClaim
    from megarl.config.schema import Config
    from megarl.config.schema.job import RayConfig
    from megarl.run.step.plan import StepPlan
    from megarl.trainer.policy import Policy

logger = logging.getLogger(__name__)

StepValues = dict[str, float]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay` to the `megarl` command."""
    parser = commands.add_parser(
        "replay",
        help="train on the recorded batches of a run, without a rollout pool",
        description="Train on the batches that a run recorded with telemetry.dump_batches=true, from model.path on, "
        "without a rollout pool. With more than one trainer rank: "
        "torchrun --rdzv-backend megarl --nproc-per-node N -m megarl replay ...",
        epilog="example: torchrun --rdzv-backend megarl --nproc-per-node 2 -m megarl replay --run-dir runs/quickstart "
        "--steps 5 "
        "trainer.optimizer.lr=1e-5",
    )
    parser.add_argument("--run-dir", type=Path, required=True, metavar="RUN_DIR", help="recorded run")
    parser.add_argument("--steps", type=int, metavar="N", help="only the first N recorded steps (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where metrics go (default: RUN_DIR/replay)")
    parser.add_argument("--batches", type=Path, metavar="DIR", help="recorded batches (default: RUN_DIR/batches)")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="resume after the step of this checkpoint (of any layout)",
    )
    parser.add_argument("--export", action="store_true", help="export the final policy to OUT/hf")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the run's config")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the replay; return 0. Raises ConfigError for a user's mistake.

    If training fails, the process ends with exit status 1 and the first failed rank reports once.
    """
    try:
        return _run(options)
    except DumpError as error:
        raise ConfigError([str(error)]) from None


def _run(options: argparse.Namespace) -> int:
    config = replay_config(options.run_dir, options.out, options.overrides)
    batches = options.batches or options.run_dir / "batches"
    first = _checkpoint_step(options.checkpoint)
    steps = choose_steps(batches, options.steps, first)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != (gpus := config.trainer.gpus):
        raise ConfigError([
            f"trainer.gpus: the run used {gpus} ranks, but {world} were started; use torchrun --rdzv-backend megarl "
            f"--nproc-per-node {gpus} -m megarl replay --run-dir {options.run_dir}, or override trainer.gpus={world} "
            "and the layout (trainer.parallel.*)"
        ])  # fmt: skip
    _refuse_inputs_inside(config.run_dir, options.run_dir, batches, options.checkpoint)
    schedule = read_schedule(options.run_dir / SCHEDULE_FILE)
    from megarl.run.start.torchrun_hints import claim_for_ranks

    held = claim_for_ranks(config.run_dir, config.timeouts.node_s, int(os.environ.get("RANK", "0")), "megarl replay")
    try:
        return _run_rank(_Replay(config, batches, steps, schedule, options.checkpoint, options.export), held)
    finally:
        if held is not None:
            held.release()


@dataclass(frozen=True)
class _Replay:
    """A replay of `steps` of `batches`, starting from `checkpoint` or `model.path`."""

    config: Config
    batches: Path
    steps: Sequence[int]
    schedule: Mapping[int, ScheduledStep]
    checkpoint: Path | None
    export: bool


def replay_config(run_dir: Path, out: Path | None, overrides: Sequence[str]) -> Config:
    """Return the recorded run's config with `overrides` and `out` as its directory (default: RUN_DIR/replay).

    Raises ConfigError if the run has no config or an override is wrong.
    """
    from megarl.config.loading.load import load_config

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError([f"--run-dir: {run_dir} has no config.yaml, so it is not a run directory"])
    fixed = [f"run.dir={out or run_dir / 'replay'}", "telemetry.dump_batches=false", "telemetry.samples_per_step=0"]
    return load_config(path, [*fixed, *overrides], stored=True)


def _refuse_inputs_inside(out: Path, run_dir: Path, batches: Path, checkpoint: Path | None) -> None:
    """Raise ConfigError if an input is in the output directory: its content is moved aside at the start."""
    if out.resolve() == run_dir.resolve():
        raise ConfigError([f"--out: {out} is the recorded run itself; choose another directory"])
    for option, path in (("--batches", batches), ("--checkpoint", checkpoint)):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise ConfigError([f"--out: {out} holds {path} ({option}); choose another directory"])


def _checkpoint_step(path: Path | None) -> int:
    """Return the finished steps of a checkpoint; 0 without one. Raises ConfigError if `path` is not a checkpoint."""
    from megarl.checkpoint.format.manifest import Manifest

    try:
        return Manifest.read(path).step if path is not None else 0
    except ValueError as error:
        raise ConfigError([f"--checkpoint: {error}"]) from None


def choose_steps(batches: Path, limit: int | None, first: int = 0) -> list[int]:
    """Return the first `limit` recorded steps from step `first` on.

    Raises DumpError if there are none, if one is missing in between, or if `limit` is below 1.
    """
    recorded = [step for step in recorded_steps(batches) if step >= first]
    if not recorded:
        raise DumpError(f"{batches}: no recorded batch; run the training with telemetry.dump_batches=true")
    if limit is not None and limit < 1:
        raise DumpError(f"--steps: {limit} steps leave nothing to replay; give 1 or more, or leave it out")
    missing = sorted(set(range(recorded[0], recorded[-1] + 1)) - set(recorded))
    if missing:
        raise DumpError(
            f"{batches}: step {missing[0]} is missing or incomplete between {recorded[0]} and {recorded[-1]}"
        )
    return recorded[:limit]


@dataclass(frozen=True)
class ScheduledStep:
    """The groups replaced before a step, and those of earlier steps that it reused.

    `trained`: the number of groups that it was the first to train; None if it was not committed.
    """

    replaced: list[int]
    reused: list[int]
    trained: int | None = None


def read_schedule(path: Path) -> dict[int, ScheduledStep]:
    """Return the steps of a schedule, without those that a resume discarded; empty if nothing was recorded."""
    steps: dict[int, ScheduledStep] = {}
    for _, event in read_json_lines(path, msgspec.json.Decoder(dict[str, Any])):
        if event["event"] == "begin":
            steps = {step: each for step, each in steps.items() if step < event["state"]["steps"]}
        elif event["event"] == "hold":  # the batches in training when a new controller took over
            for each in event["taken"]:
                steps[each["step"]] = ScheduledStep(each["replaced"], [group for group, *_ in each["reused"]])
        elif event["event"] == "batch":
            steps[event["step"]] = ScheduledStep(event["replaced"], event.get("reused", []))
        elif event["event"] == "commit":
            steps[event["step"]] = replace(steps[event["step"]], trained=event["trained"])
    return steps


def replay_steps(
    policy: Policy,
    config: Config,
    batches: Path,
    steps: Sequence[int],
    on_step: Callable[[int, StepValues], None] | None = None,
    schedule: Mapping[int, ScheduledStep] | None = None,
) -> None:
    """Train `policy` on recorded steps, in order. Collective over the ranks of the layout.

    `on_step` gets the number of steps done (as in the run's own metrics) and each step's reduced metrics, on every
    rank. `schedule`: from `read_schedule`. Raises RuntimeError if ranks read different batches.
    """
    from megarl.run.record.batch_metrics import record_batch
    from megarl.run.step.step import train_step
    from megarl.telemetry.metrics.declarations import step_metrics
    from megarl.telemetry.metrics.timer import PhaseTimer
    from megarl.trainer import parallel

    timer, metrics = PhaseTimer(), step_metrics()
    for step in steps:
        with timer.phase("queue"):
            batch, replaced, reused, skipped = read_batch(batches, step), [], [], False
            _check_sets({tag.dataset for tag in batch.tags}, {each.name for each in train_sets(config)}, batches, step)
            if schedule is not None and (scheduled := schedule.get(step)) is not None:
                replaced = scheduled.replaced if refill_groups(config) else []
                reused = scheduled.reused if config.admission.max_uses > 1 else []
                skipped = scheduled.trained == 0 and not scheduled.reused
            plan = _plan(batch, config, replaced, reused, dp_size=parallel.dp_size())
            if skipped and plan.outcome.trained:  # by an alarm, or because its numbers were not finite
                plan = plan.skipped() or plan
            if len(set(parallel.dp_all_gather_object(plan.hash, TEXT))) != 1:
                raise RuntimeError(f"the ranks read different batches of step {step} from {batches}; is it shared?")
            wanted = set(plan.keys_of(parallel.dp_rank()))
            rows = {row.key: row for row in batch.trajectories if row.key in wanted}
            policy.show_images(read_images(batches, rows.values()))
        trained = train_step(policy, plan, rows, config, timer, metrics, step=step)
        policy.refresh_reference(step + 1)
        record_batch(metrics, plan, trained)
        values = metrics.reduce() | timer.finish_step()
        if on_step is not None:
            on_step(step + 1, values)


def _plan(batch: DumpedBatch, config: Config, replaced: list[int], reused: list[int], *, dp_size: int) -> StepPlan:
    """Plan a recorded step. Raises DumpError if the config's options drop a group that the step reused."""
    from megarl.run.step.plan import ReuseError, plan_step

    try:
        return plan_step(batch.tags, config, dp_size=dp_size, version=batch.version, replaced=replaced, reused=reused)
    except ReuseError as error:
        raise DumpError(
            f"step {batch.step}: {error}: the options differ from those of the run; with admission.max_uses=1 a "
            f"reused group counts like any other"
        ) from error


def _check_sets(found: set[str], own: set[str], batches: Path, step: int) -> None:
    """Raise DumpError unless the config has the data sets of a recorded batch, which set limits and temperatures."""
    if other := sorted(found - own):
        raise DumpError(
            f"{batches}: step {step} has samples of data set {other[0]!r}, but the config has {sorted(own)} ('' is "
            "that of data.path); replay with the data sections of the run that recorded the batches"
        )


def _run_rank(replay: _Replay, held: RunClaim | None) -> int:
    """Run the whole replay of one rank: process group, policy, steps, export. After Ctrl-C the process ends with 130.

    `held`: the claim of the output directory, if this rank holds it.
    """
    from megarl.common.process.output import redirect_output
    from megarl.run.ranks.failure import FailureReport, set_aside

    rank, run_dir = int(os.environ.get("RANK", "0")), replay.config.run_dir
    log_file = run_dir / "logs" / f"replay-rank-{rank}.log"
    terminal = redirect_output(log_file)
    failure = FailureReport(run_dir, rank)
    if rank == 0:
        set_aside(run_dir)
    try:
        with interrupted_once(CTRL_C):
            _train(replay, terminal)
    except KeyboardInterrupt:
        if rank == 0:  # standard error is the log file by now
            terminal.write("megarl: interrupted; the same command starts again\n")
            terminal.flush()
        if held is not None:
            held.release()
        os._exit(130)  # peers may be inside a collective or have left it, so destroying the process group could hang
    except Exception as error:
        try:
            failure.claim(error, terminal, log_file)
        finally:
            os._exit(1)  # sys.exit could hang: peers may be waiting in a collective that this rank has left
    return 0


def _train(replay: _Replay, terminal: TextIO) -> None:
    from megarl.common.process.processes import die_with_parent

    if "RANK" in os.environ:
        die_with_parent()  # torchrun's agent
    from megarl import platforms

    platform = platforms.activate(int(os.environ.get("LOCAL_RANK", "0")))
    import torch

    from megarl.config.checks.sections import check
    from megarl.config.derived.pools import trainer_layout
    from megarl.telemetry.sinks.sinks import MetricsWriter
    from megarl.trainer import parallel
    from megarl.trainer.policy import Policy

    config, steps, schedule = replay.config, replay.steps, replay.schedule
    info = check(config, files=False)
    _init_process_group(platform.backend, config.ray, config.timeouts.collective_s, config.run_dir)
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    parallel.initialize(layout, seed=config.run.seed, timeout_s=config.timeouts.collective_s)
    leads = torch.distributed.get_rank() == 0
    policy = Policy(config, layout, info)
    if replay.checkpoint is not None:
        from megarl.checkpoint.save.training_state import load_trainer_state

        record = json.loads((replay.checkpoint / "state.json").read_text())
        load_trainer_state(policy, replay.checkpoint, record["trainer"], with_rng=False)
    writer = MetricsWriter.open(config, terminal) if leads else None
    try:
        if writer is not None:
            writer.progress.message(f"replaying {len(steps)} steps of {replay.batches} on {layout.world_size} rank(s)")
        replay_steps(policy, config, replay.batches, steps, None if writer is None else writer.write, schedule)
        if replay.export:
            _export(policy, config.trainer.precision, config.model.path, config.run_dir / "hf")
        if writer is not None:
            writer.progress.message(f"metrics: {config.run_dir / 'metrics.jsonl'}")
    finally:
        if writer is not None:
            writer.close()
    torch.distributed.barrier()
    parallel.destroy()
    torch.distributed.destroy_process_group()


def _export(policy: Policy, precision: str, source: Path, out: Path) -> None:
    import torch

    from megarl.models.hf.export import HFExporter, save_hf

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    exporter = HFExporter(policy.module_chunks, policy.info, dtype)
    save_hf(exporter, source, out, overwrite=True)


def _init_process_group(backend: str, ray: RayConfig, collective_s: float, run_dir: Path) -> None:
    import torch

    if "RANK" in os.environ:
        from megarl.cluster.pool.network import one_node_environment
        from megarl.run.ranks.control_group import join_peers

        os.environ.update(one_node_environment(ray))
        join_peers(backend, collective_s, run_dir)
    else:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
