"""The options of reward shaping in a config, for the rollout side's filter and for the trainer's."""

from __future__ import annotations

from megarl.algorithms.filters import ShapingSpec
from megarl.config.derived.algorithm import filters_equal_rewards, uses_turn_rewards
from megarl.config.derived.datasets import train_sets
from megarl.config.schema import Config


def shaping_of(config: Config) -> ShapingSpec:
    """Return what decides which groups are trained on, and with which rewards."""
    return ShapingSpec(
        truncated=config.sampling.truncated,
        max_tokens=config.sampling.max_tokens,
        overlong_buffer=config.algorithm.overlong.buffer_tokens,
        overlong_penalty=config.algorithm.overlong.penalty,
        filter_zero_variance=filters_equal_rewards(config),
        permutation_seed=config.run.seed if config.algorithm.permute_rewards else None,
        unfiltered=frozenset(each.name for each in train_sets(config) if each.teacher is not None),
        by_turn=uses_turn_rewards(config),
    )
