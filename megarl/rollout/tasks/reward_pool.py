"""The reward processes of one process of the rollout side: of the controller, or of an agent worker."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.derived.datasets import reward_functions
from megarl.config.schema import Config
from megarl.rewards.types import RewardSpec
from megarl.rewards.worker_pool import RewardPool


def reward_pool(config: Config, report: Callable[[str], None], *, shares: int = 1) -> RewardPool:
    """Return the pool of the config's reward functions, not started.

    `report`: see `RewardPool`. `shares`: the processes among which `reward.workers` are divided; each has at least one.
    """
    return RewardPool(
        [RewardSpec(each.function, each.kwargs, key) for key, each in reward_functions(config).items()],
        workers=max(1, config.reward.workers // shares),
        timeout_s=config.reward.timeout_s,
        on_error=config.reward.on_error,
        start_timeout_s=config.timeouts.engine_start_s,
        memory_gib=config.reward.memory_gib,
        max_error_share=config.reward.max_error_share,
        min_errors=config.reward.min_errors,
        report=report,
    )
