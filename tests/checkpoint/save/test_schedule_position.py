"""A resume with another number of mini-batches goes on where the run was, not where its count of updates was."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoint.save.training_state import scheduler_position
from megarl.config.schema import OptimizerConfig
from megarl.trainer.optimizer import build_scheduler

STEPS, STOPPED = 8, 5
WANTED = [lr * 1e-5 for lr in (8.75, 7.5, 6.25, 5, 3.75, 2.5, 1.25, 0)]


def rates(before: int, after: int) -> list[float]:
    """Return the learning rate after each step of a run whose `mini_batches` change when it resumes."""
    group = {"lr": 0.0, "weight_decay": 0.0, "max_lr": 1e-4, "min_lr": 0.0, "wd_mult": 1.0, "lr_mult": 1.0}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    settings = OptimizerConfig(lr=1e-4, schedule="linear", warmup_steps=0, min_lr=0.0)
    found = []
    for mini_batches, steps in ((before, range(STOPPED)), (after, range(STOPPED, STEPS))):
        scheduler = build_scheduler(settings, STEPS * mini_batches, optimizer)
        if found:
            numbers = {"scheduler_step": STOPPED * before, "mini_batches": before}
            scheduler.num_steps = 0
            scheduler.step(scheduler_position(numbers, mini_batches))
        for _ in steps:
            for _ in range(mini_batches):
                scheduler.step(1)
            found.append(group["lr"])
    return found


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (3, 2)])
def test_the_learning_rate_is_that_of_the_progress(before: int, after: int) -> None:
    assert rates(before, after) == pytest.approx(WANTED, abs=1e-12)
