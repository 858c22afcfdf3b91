"""The learning rates of the updates alongside those that a loss or a gradient which is not finite prevents."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import Config
from megarl.trainer.optimizer import NonFiniteError, build_scheduler
from megarl.trainer.policy import Policy
from tests.support.trainer.configs import config

UPDATES = 6


class FakeOptimizer:
    """Notes the learning rate with which each update is made; the norm of the next gradient may not be finite."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{}, {"wd_mult": 0.0}]
        self.finite = True
        self.rates: list[float] = []

    def step(self) -> tuple[bool, float, None]:
        if not self.finite:
            raise NonFiniteError("the gradient norm is nan; no weight was changed")
        self.rates.append(self.param_groups[0]["lr"])
        return True, 1.0, None


def scheduler_of(config: Config, optimizer: FakeOptimizer) -> Any:
    updates = config.run.steps * config.trainer.mini_batches
    return build_scheduler(config.trainer.optimizer, updates, optimizer)  # type: ignore[arg-type]


def policy_with(schedule: str, warmup: int) -> tuple[Policy, FakeOptimizer]:
    """A policy without a model: its loss is what `outcome` says."""
    policy, optimizer = object.__new__(Policy), FakeOptimizer()
    settings_of = config(
        "model",
        run__steps=UPDATES,
        trainer__optimizer__schedule=schedule,
        trainer__optimizer__warmup_steps=warmup,
        trainer__optimizer__min_lr=1e-7,
    )
    policy.optimizer, policy.module_chunks = optimizer, []  # type: ignore[assignment]
    policy.scheduler = scheduler_of(settings_of, optimizer)
    return policy, optimizer


def update(policy: Policy, optimizer: FakeOptimizer, outcome: str) -> dict[str, float]:
    loss = float("nan") if outcome == "loss" else 0.5
    optimizer.finite = outcome != "gradient"
    policy.compute_gradients = lambda *arguments, **options: {"loss": loss}  # type: ignore[method-assign]
    return policy.update([])


@pytest.mark.parametrize("mini_batches", [1, 4])
def test_warm_up_and_decay_count_updates(mini_batches: int) -> None:
    """Two updates of warm-up, and a decay that ends with the last one, however many of them a step makes."""
    optimizer = FakeOptimizer()
    settings_of = config(
        "model",
        run__steps=UPDATES,
        trainer__mini_batches=mini_batches,
        trainer__optimizer={"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
    )
    scheduler = scheduler_of(settings_of, optimizer)
    rates = []
    for _ in range(updates := UPDATES * mini_batches):
        scheduler.step(1)
        rates.append(optimizer.param_groups[0]["lr"])
    decay = [1e-3 * (updates - number) / (updates - 2) for number in range(3, updates + 1)]
    assert rates == pytest.approx([5e-4, 1e-3, *decay])


@given(
    outcomes=st.lists(st.sampled_from(["update", "loss", "gradient"]), max_size=12),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, UPDATES - 1),
)
@settings(deadline=None)
def test_an_update_that_is_not_made_leaves_the_schedule_as_it_was(
    outcomes: list[str], schedule: str, warmup: int
) -> None:
    policy, optimizer = policy_with(schedule, warmup)
    plain, expected = policy_with(schedule, warmup)
    for outcome in outcomes:
        if outcome == "update":
            assert update(policy, optimizer, outcome) == update(plain, expected, outcome)
            continue
        before = copy.deepcopy((policy.scheduler.state_dict(), optimizer.param_groups))
        with pytest.raises(NonFiniteError, match=outcome):
            update(policy, optimizer, outcome)
        assert (policy.scheduler.state_dict(), optimizer.param_groups) == before
    assert optimizer.rates == expected.rates and optimizer.param_groups == expected.param_groups
    assert policy.scheduler.num_steps == len(optimizer.rates) == outcomes.count("update")


def test_the_first_update_after_a_skipped_one_has_the_first_rate() -> None:
    policy, optimizer = policy_with("linear", 2)
    for outcome in ("gradient", "loss"):
        with pytest.raises(NonFiniteError):
            update(policy, optimizer, outcome)
    peak = config("model").trainer.optimizer.lr
    assert [update(policy, optimizer, "update")["lr"] for _ in range(2)] == pytest.approx([peak / 2, peak])
