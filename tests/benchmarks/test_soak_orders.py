"""Orders to the run's own functions: each is obeyed once, and does what its fault says."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import soak_hooks
from benchmarks.soak import COLLECTIVE_S
from benchmarks.soak_hooks import OrderedOptions, OrderedTurn, ordered_ppo
from benchmarks.soak_kinds import ABORTED_END, FLOODED
from benchmarks.soak_orders import HOLD, SLOWER, give, take, taken, withdraw
from benchmarks.soak_reward import FORGED
from megarl.algorithms.contract import check_loss
from megarl.algorithms.losses.ppo import PPOOptions, ppo
from megarl.algorithms.token_loss import TokenInputs
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rewards.worker_pool import RewardPool, RewardSpec
from megarl.rollout.agents import single_turn


def _take_often(orders: Path) -> None:
    for _ in range(2000):
        take(orders, "fork")


def test_one_of_several_processes_takes_an_order_once(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_take_often, args=(tmp_path,)) for _ in range(3)]
    give(tmp_path, "fork")
    for each in processes:
        each.start()
    for each in processes:
        each.join(60)
    (pid,) = taken(tmp_path, "fork")
    assert pid in {each.pid for each in processes} and taken(tmp_path, "flood") == []


def test_an_order_can_be_withdrawn_until_it_is_taken(tmp_path: Path) -> None:
    orders = tmp_path / "orders"
    assert not take(orders, "flood") and taken(orders, "flood") == []
    give(orders, "flood")
    assert withdraw(orders, "flood") and not take(orders, "flood") and not withdraw(orders, "flood")


# --- the reward function, in real reward processes


def score(orders: Path, order: str) -> list[RewardOutcome]:
    """Give an order to a worker that scores ten answers, every second of them correct."""
    kwargs: dict[str, Any] = {
        "share": 0.0,
        "seed": 0,
        "sleep_s": 9.0,
        "marks": str(orders / "m"),
        "orders": str(orders),
    }
    pool = RewardPool(
        [RewardSpec("benchmarks.soak_reward:late_math", kwargs)],
        workers=1, timeout_s=10.0, on_error="drop", start_timeout_s=120,
    )  # fmt: skip
    try:
        pool.submit(RewardInput("What?", "1", answer="1")).result(300)
        give(orders, order)
        futures = [pool.submit(RewardInput("What?", str(number), answer=str(number // 2 * 2))) for number in range(10)]
        return [future.result(300) for future in futures]
    finally:
        pool.close()


@pytest.mark.parametrize(("order", "redone"), [("fork-reward", 0), ("flood-reward", 1)])
def test_a_fork_and_a_flood_happen_and_change_no_reward(tmp_path: Path, order: str, redone: int) -> None:
    outcomes = score(tmp_path, order)
    assert len(taken(tmp_path, order)) == 1
    assert [each.score for each in outcomes] == [1.0, 0.0] * 5 and FORGED not in {each.score for each in outcomes}
    assert all(each.reason is None for each in outcomes)
    assert (sum(each.redone for each in outcomes) >= 1) == bool(redone)


# --- the loss


def inputs() -> tuple[torch.Tensor, TokenInputs]:
    leaf_R = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    old_R, ones_R = torch.tensor([-1.1, -0.4, -2.0]), torch.ones(3)
    cuts = torch.tensor([0, 2, 3], dtype=torch.int32)
    return leaf_R, TokenInputs.of(leaf_R, old_R, torch.tensor([1.0, 1.0, -1.0]), ones_R, cuts)


def test_the_loss_is_ppo_but_for_one_gradient(tmp_path: Path) -> None:
    path = "benchmarks.soak_hooks:ordered_ppo"
    check_loss(path, orders=str(tmp_path), clip_high=0.3)
    options = OrderedOptions(orders=str(tmp_path))
    for spoiled in (False, True, False):
        if spoiled:
            give(tmp_path, "gradient")
        leaf_R, given = inputs()
        with torch.no_grad():
            ordered_ppo(
                TokenInputs.of(leaf_R.detach(), *vars_of(given)), options
            )  # without a gradient nothing is taken
        loss_R = ordered_ppo(given, options).loss_R
        plain_R, plain = inputs()
        expected_R = ppo(plain, PPOOptions()).loss_R
        assert torch.equal(loss_R, expected_R) and bool(loss_R.isfinite().all()), "only the gradient is spoiled"
        loss_R.sum().backward()
        expected_R.sum().backward()
        assert leaf_R.grad is not None and plain_R.grad is not None
        if spoiled:
            assert bool(leaf_R.grad.isnan().all()), leaf_R.grad
        else:
            assert torch.equal(leaf_R.grad, plain_R.grad)
    assert len(taken(tmp_path, "gradient")) == 1


def test_the_loss_takes_longer_until_the_order_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call does, in every process, and the loss is the same."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    options = OrderedOptions(orders=str(tmp_path))
    give(tmp_path, SLOWER)
    losses = [ordered_ppo(inputs()[1], options).loss_R for _ in range(2)]
    assert withdraw(tmp_path, SLOWER), "a process has taken it"
    losses.append(ordered_ppo(inputs()[1], options).loss_R)
    assert waited == [soak_hooks.SLOWER_S] * 2 and all(torch.equal(each, losses[0]) for each in losses)


def test_the_loss_is_held_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than the job may take to be aborted: a job that waits for it to end is not."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    options = OrderedOptions(orders=str(tmp_path))
    give(tmp_path, HOLD)
    losses = [ordered_ppo(inputs()[1], options).loss_R for _ in range(2)]
    assert waited == [soak_hooks.HOLD_S] and torch.equal(*losses)
    assert ABORTED_END.within_s < soak_hooks.HOLD_S < COLLECTIVE_S


def vars_of(given: TokenInputs) -> tuple[torch.Tensor, ...]:
    return given.old_logprobs_R, given.advantages_R, given.keep_R, given.cu_seqlens


# --- the agent loop


@dataclass
class Result:
    logprobs: list[float] = field(default_factory=lambda: [-1.0, -0.5])


class Context:
    """One sample, whose response and score are always the same."""

    def __init__(self, trains: bool) -> None:
        self.trains, self.group_id, self.sample_index, self.prompt = trains, 3, 1, SimpleNamespace(ids=[5])

    async def generate(self, ids: list[int]) -> Result:
        return Result()

    async def judge(self, result: Result) -> str:
        return "judged"


def test_the_loop_spoils_one_log_prob_of_a_sample_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []

    def trajectory(group_id: int, sample: int, ids: list[int], result: Result, outcome: str) -> None:
        assert (group_id, sample, ids, outcome) == (3, 1, [5], "judged")
        seen.append(result.logprobs)

    monkeypatch.setattr("benchmarks.soak_hooks.trajectory", trajectory)
    loop = OrderedTurn(orders=str(tmp_path))
    assert isinstance(loop, single_turn.SingleTurn), "evaluations go on without the loop"
    give(tmp_path, "logprob")
    for trains in (False, True, True):
        asyncio.run(loop.run(Context(trains)))  # type: ignore[arg-type]
    assert [math.isnan(each[-1]) for each in seen] == [False, True, False]
    assert all(each[0] == -1.0 for each in seen)


def test_the_loop_floods_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.soak_hooks.trajectory", lambda *parts: None)
    loop = OrderedTurn(orders=str(tmp_path))
    give(tmp_path, "flood-agent-worker")
    for _ in range(2):
        asyncio.run(loop.run(Context(True)))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert out.count(FLOODED) == 1 and len(out) > 2**25
