"""The contract of losses and advantages, checked on small random batches. A user's functions are checked before a run.

    from megarl.algorithms.contract import check_loss
    check_loss("my_module:my_loss", beta=0.1)  # in your own tests

Both are deterministic and change no input. A loss returns one finite number per token, in the dtype of its inputs. The
order of the sequences, other sequences and masked tokens make no difference, so its sum is the same for any split into
micro-batches. An advantage returns one finite number per sample, or one per turn of a sample with turn rewards. The
order of groups and samples makes no difference.

Shapes: R response tokens, S sequences.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.group_rewards import Advantages, GroupRewards, advantages_of
from megarl.algorithms.interface.registry import Chosen
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import LOSSES

Loss = Chosen[TokenInputs, TokenLoss]
Advantage = Chosen[GroupRewards, Advantages]

_LENGTHS = (5, 1, 9, 3, 4)


class ContractError(ValueError):
    """A function breaks its contract."""


def check_loss(loss: Loss | str, **options: object) -> None:
    """Check a loss, or the one at an import path with these options. Raises ContractError that says what is wrong."""
    chosen = LOSSES.find(loss).choose(options) if isinstance(loss, str) else loss
    batch = _random_batch(0)
    whole = _result(chosen, batch)
    _check_form(chosen, batch)
    _check_same(chosen, whole, _result(chosen, batch), "a second call gives another result")
    _check_order_and_splits(chosen, batch, whole)
    _check_masked_tokens(chosen, batch, whole)
    _check_extremes(chosen)
    _result(chosen, _Batch([]))


def check_advantage(advantage: Advantage | str, **options: object) -> None:
    """Check an advantage, or the one at an import path with these options; else as `check_loss`."""
    chosen = ADVANTAGES.find(advantage).choose(options) if isinstance(advantage, str) else advantage
    generator = random.Random(0)
    rewards = [[round(generator.uniform(-1, 1), 3) for _ in range(size)] for size in (4, 2, 5)] + [[1.0, 1.0]]
    tokens = [[generator.randrange(0, 9) for _ in group] for group in rewards]
    turns = [[[generator.uniform(-1, 1) for _ in range(generator.randrange(4))] for _ in group] for group in rewards]
    for batch in (GroupRewards(rewards, tokens), GroupRewards(rewards, tokens, turns)):
        _check_order(chosen, batch)
    for special in ([], [[1.0, 1.0], [1.0, 1.0]], [[0.0]], [[1e6, -1e6], [0.0, 1e-6]]):
        for count in (0, 3):
            _advantages(chosen, GroupRewards(special, [[count] * len(group) for group in special]))


def _check_order(chosen: Advantage, batch: GroupRewards) -> None:
    """Check that inputs do not change, and that the order of groups and samples makes no difference."""
    before = copy.deepcopy(batch)
    values = _advantages(chosen, batch)
    if batch != before:
        raise ContractError(f"the advantage {chosen.name} changes its inputs")
    _check_numbers(chosen, values, _advantages(chosen, batch), "a second call gives another result")
    for order in itertools.islice(itertools.permutations(range(len(batch.rewards))), 5, None, 7):
        moved = GroupRewards(
            [batch.rewards[g] for g in order], [batch.tokens[g] for g in order], [batch.turns[g] for g in order]
        )
        expected: Advantages = [values[g] for g in order]
        _check_numbers(chosen, expected, _advantages(chosen, moved), "the order of the groups changes it")
    turned = GroupRewards(
        [group[::-1] for group in batch.rewards],
        [group[::-1] for group in batch.tokens],
        [group[::-1] for group in batch.turns],
    )
    expected = [group[::-1] for group in values]
    _check_numbers(chosen, expected, _advantages(chosen, turned), "the order of the samples of a group changes it")


@dataclass(frozen=True)
class _Sequence:
    """One sequence, fp64 [length] each; `keep`: bool."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    keep: Tensor

    def only(self, chosen: Tensor) -> _Sequence:
        """Return the sequence with these tokens only."""
        return _Sequence(self.logprobs[chosen], self.old[chosen], self.advantages[chosen], self.keep[chosen])


@dataclass(frozen=True)
class _Batch:
    sequences: list[_Sequence]

    def inputs(self, leaf_R: Tensor) -> TokenInputs:
        """Return the inputs of the whole batch, with `leaf_R` ([R]) as the log-probs."""
        lengths = [len(each.keep) for each in self.sequences]
        cuts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        old, advantages, keep = (self._joined(name) for name in ("old", "advantages", "keep"))
        return TokenInputs.of(leaf_R, old, advantages, keep, cuts)

    def leaf(self) -> Tensor:
        """Return the log-probs, [R], as a leaf that requires a gradient."""
        return self._joined("logprobs").clone().requires_grad_()

    def _joined(self, name: str) -> Tensor:
        empty = torch.zeros(0, dtype=torch.bool if name == "keep" else torch.float64)
        return torch.cat([empty, *(getattr(each, name) for each in self.sequences)])


@dataclass(frozen=True)
class _Values:
    """Losses and gradients of the kept tokens of each sequence."""

    losses: list[Tensor]
    gradients: list[Tensor]


def _random_batch(seed: int, spread: float = 0.5) -> _Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    sequences = []
    for length in _LENGTHS:
        keep = torch.rand(length, generator=generator) > 0.3
        keep[0] = True
        logprobs = -normal(length).abs() - 0.1
        old = (logprobs + spread * normal(length)).clamp(max=0.0)
        sequences.append(_Sequence(logprobs, old, normal(1).expand(length).clone(), keep))
    return _Batch(sequences)


def _result(chosen: Loss, batch: _Batch) -> _Values:
    """Return what training would use of a loss. Raises ContractError if the loss fails or is not finite."""
    leaf = batch.leaf()
    inputs = batch.inputs(leaf)
    keep = inputs.keep_R
    result = _called(chosen, inputs)
    total = torch.where(keep, result.loss_R, result.loss_R.new_zeros(())).sum()
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True) if total.requires_grad else (None,)
    gradient = torch.zeros_like(leaf) if gradient is None else gradient
    if not bool(total.isfinite() and gradient.isfinite().all()):
        raise ContractError(f"the loss {chosen.name} or its gradient is not finite")
    if bool(gradient[~keep].any()):
        raise ContractError(f"the loss {chosen.name} has a gradient at masked tokens")
    lengths = [len(each.keep) for each in batch.sequences]
    parts = zip(result.loss_R.detach().split(lengths), gradient.split(lengths), batch.sequences, strict=True)
    kept = [(losses[each.keep], gradients[each.keep]) for losses, gradients, each in parts]
    return _Values([losses for losses, _ in kept], [gradients for _, gradients in kept])


def _called(chosen: Loss, inputs: TokenInputs) -> TokenLoss:
    try:
        result = chosen(inputs)
    except Exception as error:
        raise ContractError(
            f"the loss {chosen.name} fails on {inputs.keep_R.numel()} tokens of {inputs.cu_seqlens.numel() - 1} "
            f"sequences: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, TokenLoss):
        raise ContractError(f"the loss {chosen.name} returns a {type(result).__name__}; it has to be a TokenLoss")
    expected = inputs.logprobs_R
    if (result.loss_R.shape, result.loss_R.dtype) != (expected.shape, expected.dtype):
        raise ContractError(
            f"the loss {chosen.name} returns a loss of shape {tuple(result.loss_R.shape)} and {result.loss_R.dtype} "
            f"for tokens of shape {tuple(expected.shape)} and {expected.dtype}"
        )
    for name in ("ratio_R", "low_R", "high_R", "dual_R"):
        value = getattr(result, name)
        if value is not None and value.shape != expected.shape:
            raise ContractError(f"the loss {chosen.name} returns {name} of shape {tuple(value.shape)}")
        if value is not None and name != "ratio_R" and value.dtype != torch.bool:
            raise ContractError(f"the loss {chosen.name} returns {name} of {value.dtype}; it has to be bool")
    return result


def _check_form(chosen: Loss, batch: _Batch) -> None:
    """Check that inputs do not change, that fp32 stays fp32, and that there is a gradient."""
    inputs = batch.inputs(batch.leaf())
    before = copy.deepcopy({name: value.detach() for name, value in vars(inputs).items()})
    result = _called(chosen, inputs)
    if any(not torch.equal(value, before[name]) for name, value in vars(inputs).items()):
        raise ContractError(f"the loss {chosen.name} changes its inputs")
    if not result.loss_R.requires_grad:
        raise ContractError(f"the loss {chosen.name} has no gradient: it does not depend on logprobs_R")
    _called(chosen, replace(inputs, **{name: value.float() for name, value in vars(inputs).items() if name in _FLOATS}))


_FLOATS = ("logprobs_R", "old_logprobs_R", "advantages_R")


def _check_order_and_splits(chosen: Loss, batch: _Batch, whole: _Values) -> None:
    order = [3, 1, 4, 0, 2]
    moved = _result(chosen, _Batch([batch.sequences[index] for index in order]))
    back = [order.index(index) for index in range(len(order))]
    same_order = _Values([moved.losses[i] for i in back], [moved.gradients[i] for i in back])
    _check_same(chosen, whole, same_order, "the order of the sequences changes it")
    parts = [_result(chosen, _Batch(batch.sequences[start:end])) for start, end in ((0, 1), (1, 4), (4, 5))]
    joined = _Values([v for part in parts for v in part.losses], [v for part in parts for v in part.gradients])
    _check_same(chosen, whole, joined, "it depends on which sequences share a micro-batch")


def _check_masked_tokens(chosen: Loss, batch: _Batch, whole: _Values) -> None:
    trash = torch.tensor([math.nan, math.inf, -9999.0], dtype=torch.float64)

    def soiled(values: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep, values, trash[torch.arange(len(keep)) % 3])

    dirty = [
        _Sequence(
            soiled(each.logprobs, each.keep), soiled(each.old, each.keep), soiled(each.advantages, each.keep), each.keep
        )
        for each in batch.sequences
    ]
    _check_same(chosen, whole, _result(chosen, _Batch(dirty)), "values at masked tokens change it")
    without = _Batch([each.only(each.keep) for each in batch.sequences])
    _check_same(chosen, whole, _result(chosen, without), "the number of masked tokens changes it")


def _check_extremes(chosen: Loss) -> None:
    """Check that very different policies give finite numbers, even in fp32."""
    values = torch.tensor([-500.0, -30.0, -1e-6, 0.0])
    pairs = torch.cartesian_prod(values, values, torch.tensor([1.0, -1.0, 0.0]))
    keep = torch.ones(len(pairs), dtype=torch.bool)
    leaf = pairs[:, 0].clone().requires_grad_()
    cuts = torch.arange(len(pairs) + 1, dtype=torch.int32)
    loss_R = _called(chosen, TokenInputs.of(leaf, pairs[:, 1], pairs[:, 2], keep, cuts)).loss_R
    (gradient,) = torch.autograd.grad(loss_R.sum(), leaf)
    for (new, old, advantage), loss, slope in zip(pairs.tolist(), loss_R.tolist(), gradient.tolist(), strict=True):
        if not (math.isfinite(loss) and math.isfinite(slope)):
            raise ContractError(
                f"the loss {chosen.name} is {loss} and its gradient {slope} for log-prob {new:g}, old log-prob {old:g} "
                f"and advantage {advantage:g}; bound the ratio, for example with inputs.ratio"
            )


def _check_same(chosen: Loss, one: _Values, other: _Values, wrong: str) -> None:
    pairs = zip(one.losses + one.gradients, other.losses + other.gradients, strict=True)
    if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs):
        raise ContractError(f"the loss {chosen.name} breaks its contract: {wrong}")


def _advantages(chosen: Advantage, batch: GroupRewards) -> Advantages:
    try:
        return advantages_of(chosen, batch)
    except Exception as error:
        turns = f" and turn rewards {batch.turn_rewards}" if batch.turn_rewards else ""
        raise ContractError(
            f"the advantage {chosen.name} fails on the rewards {batch.rewards} of samples with {batch.tokens} tokens"
            f"{turns}: {type(error).__name__}: {error}"
        ) from error


def _check_numbers(chosen: Advantage, one: Advantages, other: Advantages, wrong: str) -> None:
    pairs = zip(_numbers(one), _numbers(other), strict=True)
    if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in pairs):
        raise ContractError(f"the advantage {chosen.name} breaks its contract: {wrong}")


def _numbers(advantages: Advantages) -> list[float]:
    """Return all numbers in order."""
    found: list[float] = []
    for value in itertools.chain(*advantages):
        found += value if isinstance(value, Sequence) else [value]
    return found
