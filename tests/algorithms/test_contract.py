"""The contract of losses and advantages: those that are shipped hold to it, and each way of breaking it is named."""

from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.contract import ContractError, check_advantage, check_loss
from megarl.algorithms.interface.group_rewards import Advantages, GroupRewards
from megarl.algorithms.interface.registry import Chosen, FunctionRegistry, options_of
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import LOSSES
from megarl.common.options import Section

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{}, {"clip_dual": 1.5}, {"clip_low": 0.0, "clip_high": 10.0}],
    "gspo": [{}, {"clip_dual": 1.5, "clip_low": 3e-4, "clip_high": 4e-4}],
    "cispo": [{}, {"clip_low": 0.2, "clip_high": 0.2}],
    "sapo": [{}, {"tau_positive": 10.0, "tau_negative": 0.1}],
    "dppo": [{}, {"divergence": "kl"}, {"low": 0.0, "high": 0.0, "cap": 1.0}],
}


@pytest.mark.parametrize("name", LOSSES.names)
def test_shipped_losses_hold_to_it(name: str) -> None:
    for options in OPTIONS[name]:
        check_loss(name, **options)


@pytest.mark.parametrize("name", ADVANTAGES.names)
def test_shipped_advantages_hold_to_it(name: str) -> None:
    check_advantage(name)


class ScaleOptions(Section):
    """One number."""

    scale: float = Field(1.0, gt=0)


def own_loss(inputs: TokenInputs, options: ScaleOptions) -> TokenLoss:
    return TokenLoss(-options.scale * inputs.ratio * inputs.advantages_R)


def own_advantage(batch: GroupRewards) -> Advantages:
    return [[reward - max(group) for reward in group] for group in batch.rewards]


def test_ones_own_by_import_path() -> None:
    path = f"{__name__}:own_loss"
    check_loss(path, scale=2.0)
    check_advantage(f"{__name__}:own_advantage")
    with pytest.raises(ValidationError, match="scales"):
        check_loss(path, scales=2.0)


def of_a_bare_tensor(inputs: TokenInputs) -> Any:
    return inputs.logprobs_R


def of_one_number(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss((inputs.ratio * inputs.advantages_R).sum())


def of_another_dtype(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss((inputs.ratio * inputs.advantages_R).float())


def always_double(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss((inputs.ratio * inputs.advantages_R).double())


def without_gradient(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss((inputs.ratio * inputs.advantages_R).detach())


def mean_over_the_pack(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(-inputs.ratio * (inputs.advantages_R - inputs.advantages_R[inputs.keep_R].mean()))


def mean_over_masked_tokens(inputs: TokenInputs) -> TokenLoss:
    ids = torch.repeat_interleave(torch.arange(inputs.cu_seqlens.numel() - 1), inputs.cu_seqlens.diff().long())
    sums = inputs.log_ratio.new_zeros(inputs.cu_seqlens.numel() - 1).index_add(0, ids, inputs.log_ratio)
    lengths = inputs.cu_seqlens.diff().clamp(min=1)
    return TokenLoss(-(sums / lengths).clamp(max=20.0).exp()[ids] * inputs.advantages_R)


def by_the_place_in_the_pack(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.ratio * inputs.advantages_R * torch.arange(1, 1 + inputs.keep_R.numel()))


def unbounded(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(-inputs.log_ratio.exp() * inputs.advantages_R)


def at_random(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.ratio * inputs.advantages_R * torch.rand(inputs.keep_R.shape, dtype=inputs.ratio.dtype))


def in_place(inputs: TokenInputs) -> TokenLoss:
    inputs.advantages_R.mul_(2.0)
    return TokenLoss(inputs.ratio * inputs.advantages_R)


def not_without_tokens(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.ratio * inputs.advantages_R / inputs.advantages_R.abs().max() * 0 + inputs.ratio)


def of_numbers_as_flags(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.ratio * inputs.advantages_R, high_R=inputs.ratio)


def of_some_tokens(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.ratio * inputs.advantages_R, ratio_R=inputs.ratio[:1])


def with_a_bug(inputs: TokenInputs) -> TokenLoss:
    return TokenLoss(inputs.rewards_R)  # type: ignore[attr-defined]


BROKEN_LOSSES = {
    of_a_bare_tensor: "returns a Tensor; it has to be a TokenLoss",
    of_one_number: r"a loss of shape \(\)",
    of_another_dtype: "torch.float32 for tokens .* torch.float64",
    always_double: "torch.float64 for tokens .* torch.float32",
    without_gradient: "has no gradient",
    mean_over_the_pack: "it depends on which sequences share a micro-batch",
    mean_over_masked_tokens: "the number of masked tokens changes it",
    by_the_place_in_the_pack: "the order of the sequences changes it",
    unbounded: "bound the ratio, for example with inputs.ratio",
    at_random: "a second call gives another result",
    in_place: "changes its inputs",
    not_without_tokens: "fails on 0 tokens of 0 sequences",
    of_numbers_as_flags: "high_R of torch.float64; it has to be bool",
    of_some_tokens: r"ratio_R of shape \(1,\)",
    with_a_bug: "fails on 22 tokens of 5 sequences: AttributeError",
}


@pytest.mark.parametrize("function", BROKEN_LOSSES, ids=lambda function: function.__name__)
def test_broken_losses_are_named(function: Any) -> None:
    with pytest.raises(ContractError, match=BROKEN_LOSSES[function]) as error:
        check_loss(Chosen("my_module:my_loss", function))
    assert "my_module:my_loss" in str(error.value)


def too_few(batch: GroupRewards) -> Advantages:
    return [group[:1] for group in map(list, batch.rewards)]


def not_a_number(batch: GroupRewards) -> Advantages:
    return [[reward / sum(abs(r - group[0]) for r in group) for reward in group] for group in batch.rewards]


def by_the_place_of_the_group(batch: GroupRewards) -> Advantages:
    return [[reward * place for reward in group] for place, group in enumerate(batch.rewards)]


def by_the_place_in_the_group(batch: GroupRewards) -> Advantages:
    return [[reward - group[0] for reward in group] for group in batch.rewards]


def sorts_its_inputs(batch: GroupRewards) -> Advantages:
    for group in batch.rewards:
        group.sort()  # type: ignore[attr-defined]
    return [list(group) for group in batch.rewards]


def counts_its_calls(batch: GroupRewards, calls: list[int] = [0]) -> Advantages:
    calls[0] += 1
    return [[reward * calls[0] for reward in group] for group in batch.rewards]


def another_number_of_turns(batch: GroupRewards) -> Advantages:
    return [[[1.0] if each else 1.0 for each in group] for group in batch.turns]


def by_the_first_sample_s_turns(batch: GroupRewards) -> Advantages:
    return [[[sum(group[0])] * len(each) if each else 0.0 for each in group] for group in batch.turns]


BROKEN_ADVANTAGES = {
    too_few: r"groups of \[1, 1, 1, 1\] numbers for groups of \[4, 2, 5, 2\] samples",
    not_a_number: "ZeroDivisionError",
    by_the_place_of_the_group: "the order of the groups changes it",
    by_the_place_in_the_group: "the order of the samples of a group changes it",
    sorts_its_inputs: "changes its inputs",
    another_number_of_turns: "returned 1 numbers for 2 turns",
    by_the_first_sample_s_turns: "the order of the samples of a group changes it",
    counts_its_calls: "a second call gives another result",
}


@pytest.mark.parametrize("function", BROKEN_ADVANTAGES, ids=lambda function: function.__name__)
def test_broken_advantages_are_named(function: Any) -> None:
    with pytest.raises(ContractError, match=BROKEN_ADVANTAGES[function]) as error:
        check_advantage(Chosen("my_module:my_advantage", function))
    assert "my_module:my_advantage" in str(error.value)


def no_options_class(inputs: TokenInputs, options: dict[str, float]) -> TokenLoss: ...  # type: ignore[empty-body]


def three_parameters(inputs: TokenInputs, options: ScaleOptions, more: int) -> TokenLoss: ...  # type: ignore[empty-body]


def keywords_only(*, inputs: TokenInputs) -> TokenLoss: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("function", [no_options_class, three_parameters, keywords_only])
def test_functions_of_another_form_are_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=rf"{function.__name__} has to take \(inputs\) or \(inputs, options: X\)"):
        options_of(function)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("pppo", "'pppo' is neither cispo, dppo, gspo, ppo, sapo nor an import path package.module:function"),
        ("nowhere.at_all:f", "'nowhere.at_all:f' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:missing", "cannot be imported: AttributeError"),
        (f"{__name__}:ScaleOptions", "is a ModelMetaclass; it has to be a function"),
        ("my loss:f", "nor an import path"),
    ],
)
def test_names_that_stand_for_nothing_are_refused(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LOSSES.find(path)


def test_a_name_is_registered_once() -> None:
    registry: FunctionRegistry[TokenInputs, TokenLoss] = FunctionRegistry("loss")
    registry.register("mine", title="Mine.", paper="none")(own_loss)
    with pytest.raises(ValueError, match="loss 'mine' is registered already"):
        registry.register("mine", title="Another.", paper="none")(own_loss)
    assert [(entry.name, entry.options, entry.own) for entry in registry] == [("mine", ScaleOptions, False)]
