"""The work of one rank of a test world: train, save in the background while training goes on, load, train on."""

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.checkpoint.save.resume import ResumeError
from megarl.checkpoint.save.training_state import (
    inner_optimizers,
    live_views,
    rng_state,
    sharded_state,
    trainer_numbers,
)
from megarl.checkpoint.save.writer import BackgroundWrite, Written
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy
from tests.support.checkout import PROMPTS
from tests.support.ranks.training.policy import exported, own_share, policy_under


@contextmanager
def run_under(model_dir: Path, layout: dict[str, Any], root: Path, **changes: Any) -> Iterator[tuple[Policy, Any]]:
    """A policy, its checkpointer and what that has said to the user."""
    own = {"checkpoint__dir": root, "run__dir": root.with_name(f"{root.name}-run"), "data__path": PROMPTS}
    with policy_under(model_dir, layout, **{**own, **changes}) as policy:
        said: list[str] = []
        checkpointer = Checkpointer(policy.config, policy, torch.distributed.group.WORLD, said.append)
        checkpointer.said = said  # type: ignore[attr-defined]
        yield policy, checkpointer


def update(policy: Policy, samples: list[TrainSample], times: int) -> list[dict[str, float]]:
    _, mine = own_share(samples)
    return [policy.update(mine) for _ in range(times)]


def save_and_go_on(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], root: Path, **changes: Any
) -> dict[str, Any]:
    """Three updates, a save, two more while it is written."""
    with run_under(model_dir, layout, root, **changes) as (policy, checkpointer):
        update(policy, samples, 3)
        saved = snapshot(policy)
        saved_ok = checkpointer.save(3, {"note": "kept"})
        metrics = update(policy, samples, 2)
        assert checkpointer.poll(wait=True) and saved_ok, checkpointer.said
        return {"saved": saved, "end": snapshot(policy), "metrics": metrics}


def resume_and_go_on(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], root: Path, **changes: Any
) -> dict[str, Any]:
    """Load the newest checkpoint, two more updates."""
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    with run_under(model_dir, layout, root, **changes) as (policy, checkpointer):
        prepared: list[int] = []
        record = checkpointer.restore(lambda chosen: prepared.append(chosen.step))
        loaded = snapshot(policy)
        metrics = update(policy, samples, 2)
        return {
            "record": record,
            "prepared": prepared,
            "saved": loaded,
            "end": snapshot(policy),
            "metrics": metrics,
            "said": checkpointer.said,
            "lr": policy.learning_rate,
        }


def resume_on(ranks_per_host: int, **arguments: Any) -> dict[str, Any]:
    """`resume_and_go_on` where torchrun has started so many ranks on this host; tells who read for whom."""
    shared: list[object] = []
    load = FullyParallelLoadStrategyWrapper.load

    def noted(self: FullyParallelLoadStrategyWrapper, *args: Any) -> Any:
        shared.append(self)
        return load(self, *args)

    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks_per_host)}),
        mock.patch.object(FullyParallelLoadStrategyWrapper, "load", noted),
    ):
        return resume_and_go_on(**arguments) | {"shared": len(shared)}


def snapshot(policy: Policy) -> dict[str, Any]:
    """Everything a checkpoint has to bring back: weights, this rank's optimizer shard, random states, positions."""
    states = [
        {name: value.clone() for name, value in state.items()}
        for inner in inner_optimizers(policy.optimizer)
        for state in inner.optimizer.state.values()
    ]
    return {
        "weights": exported(policy),
        "optimizer": states,
        "rng": rng_state(),
        "numbers": trainer_numbers(policy),
        "expert_bias": [
            module.expert_bias.clone()
            for chunk in policy.module_chunks
            for module in chunk.modules()
            if getattr(module, "expert_bias", None) is not None
        ],
    }


def full_disk(model_dir: Path, samples: list[TrainSample], root: Path) -> dict[str, Any]:
    """Saves of steps 1..4: sound, a shard of rank 1 on a full disk, state.json on one, sound again."""
    with run_under(model_dir, {}, root, checkpoint__asynchronous=False) as (policy, checkpointer):
        outcomes = []
        create = checkpointer.directory.create_partial
        for step, full in enumerate([None, "__1_0.distcp", "state.json", None], start=1):
            update(policy, samples, 1)

            def create_with(step: int, full: str | None = full) -> Path:
                partial: Path = create(step)
                if full is not None:
                    (partial / full).symlink_to("/dev/full")
                return partial

            checkpointer.directory.create_partial = create_with
            outcomes.append(checkpointer.save(step, {}))
        return {"outcomes": outcomes, "said": checkpointer.said, "steps": checkpointer.directory.steps()}


def planned_saves(model_dir: Path, root: Path) -> list[bool]:
    """What `due` says after each of eight steps by the clock of rank 0 alone: rank 1's says the opposite."""
    changes = {"checkpoint__every": "auto", "checkpoint__keep_every": 5, "run__steps": 8}
    with run_under(model_dir, {}, root, **changes) as (_, checkpointer):
        reported = []
        for step in range(1, 9):
            affordable = (step == 3) == (torch.distributed.get_rank() == 0)
            checkpointer._saved_at, checkpointer._save_s = time.monotonic() - (1000 if affordable else 0), 1.0
            reported.append(checkpointer.due(step))
        assert checkpointer.save(8, {}, wait=True) and checkpointer._save_s != 1.0
        checkpointer.directory.create_partial = _refuse
        held = checkpointer._save_s = 3.0
        assert not checkpointer.save(9, {}) and checkpointer._save_s >= held
        return reported


def _refuse(step: int) -> Path:
    raise OSError(f"no space for step {step}")


def keep_best(
    model_dir: Path,
    samples: list[TrainSample],
    root: Path,
    metric: str,
    values: list[float | None],
    later: bool,
) -> list[list[int]]:
    """Saves of steps 1, 2, ... whose newest evaluation had these values, None without one: the steps that are kept.

    `later`: the evaluation ends after the save. What must not count has the best value: an evaluation of a checkpoint
    that is not the newest one any more, and the metrics of the other ranks.
    """
    changes = {"checkpoint__keep_last": 1, "checkpoint__keep_best": metric}
    kept = []
    with run_under(model_dir, {}, root, **changes) as (policy, checkpointer):
        update(policy, samples, 1)
        for step, value in enumerate(values, start=1):
            metrics = {} if value is None else {metric: value, "eval/other/greedy": -value}
            assert checkpointer.save(step, {"metrics": {} if later else metrics}, wait=True), checkpointer.said
            if later:
                best = {metric: 9.0}
                checkpointer.add_evaluation(step - 1, best)
                for rank in range(torch.distributed.get_world_size()):
                    if rank == torch.distributed.get_rank():
                        checkpointer.add_evaluation(step, best if rank else metrics)
                    torch.distributed.barrier()
            kept.append(checkpointer.directory.steps())
            torch.distributed.barrier()
    return kept


def hanging_disk(model_dir: Path, samples: list[TrainSample], root: Path) -> dict[str, Any]:
    """Saves of steps 1..3: the disk of rank 1 hangs from the first until after the second."""
    works = threading.Event()
    with run_under(model_dir, {}, root, timeouts__save_s=2) as (policy, checkpointer):
        update(policy, samples, 1)
        real = BackgroundWrite._write_all
        if torch.distributed.get_rank() == 1:

            def hang(write: BackgroundWrite) -> Written:
                assert works.wait(timeout=120)
                return real(write)

            BackgroundWrite._write_all = hang  # type: ignore[method-assign]
        outcomes = [checkpointer.save(1, {}, wait=True), checkpointer.save(2, {}, wait=True)]
        failure, untouched = checkpointer.failure, checkpointer.directory.partial(1).is_dir()
        torch.distributed.barrier()
        BackgroundWrite._write_all = real  # type: ignore[method-assign]
        works.set()
        for thread in checkpointer._threads:
            thread.join(timeout=60)
        outcomes.append(checkpointer.save(3, {}, wait=True))
        return {"outcomes": outcomes, "failure": failure, "untouched": untouched, "last": checkpointer.failure}


def refused_target(model_dir: Path, samples: list[TrainSample], root: Path) -> dict[str, Any]:
    """A save into a directory that cannot be made, for it is a file."""
    with run_under(model_dir, {}, root / "file" / "checkpoints") as (policy, checkpointer):
        update(policy, samples, 1)
        return {"saved": checkpointer.save(1, {}, wait=True), "said": checkpointer.said}


def histories(model_dir: Path, samples: list[TrainSample], root: Path) -> dict[str, Any]:
    """Steps 1..3 saved; then a resume from step 1 by its path, another one by `never`: steps there, what is next to."""
    with run_under(model_dir, {}, root, checkpoint__keep_last=3) as (policy, checkpointer):
        for step in (1, 2, 3):
            update(policy, samples, 1)
            checkpointer.save(step, {}, wait=True)
    found = []
    for resume in (str(root / "iter_0000001"), "never"):
        with run_under(model_dir, {}, root, checkpoint__resume=resume) as (policy, checkpointer):
            checkpointer.restore(lambda chosen: None)
            torch.distributed.barrier()
            aside = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name.count("."))
            found.append((policy.scheduler.num_steps, checkpointer.directory.steps(), aside))
            torch.distributed.barrier()
    return {"found": found}


def contradiction(model_dir: Path, other: Path, samples: list[TrainSample], root: Path, **changes: Any) -> list[str]:
    """Saved by one model, resumed by another, or with `changes`."""
    with run_under(model_dir, {}, root) as (policy, checkpointer):
        update(policy, samples, 1)
        checkpointer.save(1, {}, wait=True)
    with run_under(other, {}, root, **changes) as (policy, checkpointer):
        try:
            checkpointer.restore(lambda chosen: None)
        except ResumeError as error:
            return [str(error)]
    return []


def optimizer_parts(model_dir: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Elements of the optimizer's shards before its first step, against what the rank holds; all of them views?"""
    with policy_under(model_dir, layout) as policy:
        shards = [
            shard
            for parts in live_views(sharded_state(policy)["optimizer"]).values()
            for boxes in parts.values()
            for shard in boxes.values()
        ]
        held = [
            tensor
            for inner in inner_optimizers(policy.optimizer)
            for group in inner.optimizer.param_groups
            for parameter in group["params"]
            for tensor in (parameter, *inner.optimizer.state[parameter].values())
            if tensor.numel() > 1
        ]
        storages = {tensor.untyped_storage().data_ptr() for tensor in held}
        return {
            "elements": sum(shard.numel() for shard in shards),
            "held": sum(tensor.numel() for tensor in held) // 3,
            "parameters": sum(p.numel() for chunk in policy.module_chunks for p in chunk.parameters()),
            "views": all(shard.untyped_storage().data_ptr() in storages for shard in shards),
        }
