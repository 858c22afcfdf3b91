"""The loss and the advantage that a config chooses, with their options. Shipped ones do not import torch.

Options are keys of `algorithm.loss_options` and `algorithm.advantage_options`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.filters import ShapingSpec
from megarl.algorithms.interface.group_rewards import Advantages, GroupRewards
from megarl.algorithms.interface.registry import Chosen, FunctionRegistry
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import LOSSES
from megarl.common.errors import ConfigError
from megarl.config.derived.datasets import train_sets
from megarl.config.loading.load import explain
from megarl.config.schema import Config
from megarl.config.schema.algorithm import AlgorithmConfig

I = TypeVar("I")  # noqa: E741  # inputs
R = TypeVar("R")  # result

# Advantages without a baseline of the group: equal rewards are a signal.
_BATCH_BASELINES = ("reinforce_pp",)
# Advantages that also use turn rewards: a group where only these differ is kept.
_BY_TURN = ("mt_grpo",)


def loss_of(algorithm: AlgorithmConfig) -> Chosen[TokenInputs, TokenLoss]:
    """Return the policy loss with its options. Raises ConfigError listing every problem."""
    return _chosen(LOSSES, algorithm.loss, algorithm.loss_options)


def advantage_of(algorithm: AlgorithmConfig) -> Chosen[GroupRewards, Advantages]:
    """Return the advantage with its options. Raises ConfigError listing every problem."""
    return _chosen(ADVANTAGES, algorithm.advantage, algorithm.advantage_options)


def filters_equal_rewards(algorithm: AlgorithmConfig) -> bool:
    """Return whether groups with equal rewards are dropped: as configured; by default if they have no signal."""
    asked = algorithm.filter_zero_variance
    return algorithm.advantage not in _BATCH_BASELINES if asked is None else asked


def algorithm_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield what is wrong with the loss, the advantage or their options, including a user's function's contract."""
    for kind, choose in (("loss", loss_of), ("advantage", advantage_of)):
        try:
            chosen: Any = choose(algorithm)
            if ":" in chosen.name:
                from megarl.algorithms import contract  # imports torch

                (contract.check_loss if kind == "loss" else contract.check_advantage)(chosen)
        except ConfigError as error:
            yield from error.problems
        except ValueError as error:
            yield f"algorithm.{kind}: {error}"


def _chosen(registry: FunctionRegistry[I, R], name: str, options: Mapping[str, Any]) -> Chosen[I, R]:
    """Return a registered or a user's function with its options. Raises ConfigError listing every problem."""
    kind = registry.kind
    key = f"algorithm.{kind}_options"
    try:
        entry = registry.find(name)
    except ValueError as error:
        raise ConfigError([f"algorithm.{kind}: {error}"]) from None
    known = list(entry.options.model_fields) if entry.options is not None else []
    if unknown := [option for option in options if option not in known]:
        has = f"its options are {', '.join(known)}" if known else "it has none"
        raise ConfigError([f"{key}.{option}: the {kind} {entry.name} has no such option; {has}" for option in unknown])
    try:
        return entry.choose(options)
    except ValidationError as error:
        raise ConfigError([f"{key}.{explain(detail)}" for detail in error.errors(include_url=False)]) from None


def shaping_of(config: Config) -> ShapingSpec:
    """Return the options of reward shaping, for the filters of rollout and trainer."""
    return ShapingSpec(
        truncated=config.sampling.truncated,
        max_tokens=config.sampling.max_tokens,
        overlong_buffer=config.algorithm.overlong.buffer_tokens,
        overlong_penalty=config.algorithm.overlong.penalty,
        filter_zero_variance=filters_equal_rewards(config.algorithm),
        permutation_seed=config.run.seed if config.algorithm.permute_rewards else None,
        unfiltered=frozenset(each.name for each in train_sets(config) if each.teacher is not None),
        by_turn=config.algorithm.advantage in _BY_TURN,
    )
