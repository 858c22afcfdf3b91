"""Reward pools with defaults for tests, and what tests ask of them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from megarl.rewards.types import OnError, RewardInput, RewardResult, RewardSpec
from megarl.rewards.worker_pool import RewardPool


def make_reward_pool(
    function: str,
    kwargs: dict[str, Any] | None = None,
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    on_error: OnError = 0.0,
    **options: Any,
) -> RewardPool:
    return RewardPool(
        [RewardSpec(function, kwargs or {})],
        workers=workers,
        timeout_s=timeout_s,
        on_error=on_error,
        start_timeout_s=120.0,
        **options,
    )


def score_all(pool: RewardPool, samples: Sequence[RewardInput], within_s: float = 240.0) -> list[RewardResult]:
    """Score samples concurrently; outcomes in the order of the samples. Raises TimeoutError after `within_s`."""

    async def gather() -> list[RewardResult]:
        async with asyncio.timeout(within_s):
            return list(await asyncio.gather(*(pool.score(sample) for sample in samples)))

    return asyncio.run(gather())


def worker_pids(pool: RewardPool) -> list[int]:
    return [process._child.pid for process in pool._processes.values()]
