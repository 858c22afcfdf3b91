"""Changes of the config that a run of the soak needs, so that a kind of fault can happen to it.

Both runs of a soak have it, the undisturbed one too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_kinds import Kind  # noqa: E402

AGENT_WORKERS = 2
LEAST_SKIPPED = 2  # steps, at every start of the run


@dataclass(frozen=True)
class Tempo:
    """The time limits for silent parts of a run, and the length of its steps under a fault.

    `rpc_s`: the limit for engines. `weight_sync_s`: the limit for publications, which takes longer if an engine is
    silent in one. `slower`: while a fault lasts, the trainer takes its time with each step, so that a fast machine does
    not reach the last step before the run is over the last fault.
    """

    rpc_s: float = 20.0
    weight_sync_s: float = 40.0
    slower: bool = False


def orders_of(run_dir: Path) -> Path:
    """Return the directory in which orders are given (soak_orders.py)."""
    return run_dir.with_suffix(".orders")


def checkpoints_of(run_dir: Path, kinds: Collection[Kind]) -> Path:
    """Return the directory of a run's checkpoints: beside its own if their disk is to be full alone."""
    alone = any(kind.target == "checkpoint-disk" for kind in kinds)
    return run_dir.with_suffix(".checkpoints") if alone else run_dir / "checkpoints"


def evaluation_reward(kinds: Collection[Kind], run_dir: Path) -> dict[str, Any]:
    """Return the reward of evaluations, which tells that one is under way if a fault is to hit it."""
    if not any(kind.target == "evaluation" for kind in kinds):
        return {"function": "math"}
    return {"function": "benchmarks.soak_reward:watched_math", "kwargs": {"orders": str(orders_of(run_dir))}}


def changes_for(kinds: Collection[Kind], run_dir: Path, replicas: int, tempo: Tempo) -> dict[str, dict[str, Any]]:
    """Return the changes of the config by which faults of these kinds can happen to a run of `replicas` at a tempo."""
    targets, orders = {kind.target for kind in kinds}, str(orders_of(run_dir))
    spoiled = sum(kind.action == "spoil" and kind.ending is None for kind in kinds)
    changes: dict[str, dict[str, Any]] = {}
    if "agent-worker" in targets:
        changes.setdefault("rollout", {})["agent_workers"] = AGENT_WORKERS
    if any(kind.action == "add" for kind in kinds):
        changes.setdefault("rollout", {})["max_replicas"] = replicas + 1
    if "checkpoint-disk" in targets:
        changes["checkpoint"] = {"dir": str(checkpoints_of(run_dir, kinds))}
    if targets & {"gradient", "steps"} or tempo.slower or any(kind.action == "abort" for kind in kinds):
        changes["algorithm"] = {"loss": "benchmarks.soak_hooks:ordered_ppo", "loss_options": {"orders": orders}}
    if "logprob" in targets or any(kind.target == "agent-worker" and kind.order for kind in kinds):
        changes["agent"] = {"loop": "benchmarks.soak_hooks:OrderedTurn", "kwargs": {"orders": orders}}
    if spoiled or "steps" in targets:
        changes["trainer"] = {"max_skipped_steps": max(LEAST_SKIPPED, spoiled)}
    return changes
