"""The loss and the advantage that a config chooses: names, options, one's own; one message per mistake."""

from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.advantages import GRPOOptions
from megarl.algorithms.losses import CISPOOptions, GSPOOptions, PPOOptions, SAPOOptions
from megarl.common.errors import ConfigError
from megarl.config.checks.sections import check
from megarl.config.derived.algorithm import advantage_of, algorithm_problems, filters_equal_rewards, loss_of, shaping_of
from megarl.config.derived.training_loss import default_weights, needed_streams, objective_of
from megarl.config.loading.load import config_from_tree, parse_yaml, to_yaml
from megarl.config.schema import Config
from tests.support.losses.samples import trajectory_of
from tests.support.trainer.configs import config, tree

TOPR = "examples.tutorials.own_loss.topr:topr"
MEDIAN = "examples.tutorials.own_loss.topr:above_median"


def chosen(**algorithm: Any) -> Config:
    return config("model", algorithm=algorithm)


@pytest.mark.parametrize(
    ("algorithm", "name", "options"),
    [
        ({}, "ppo", PPOOptions(clip_low=0.2, clip_high=0.2, clip_dual=None)),
        ({"loss_options": {"clip_low": 0.1, "clip_dual": 10.0}}, "ppo", PPOOptions(clip_low=0.1, clip_dual=10)),
        ({"loss": "gspo", "loss_options": {"clip_low": 3e-4}}, "gspo", GSPOOptions(clip_low=3e-4, clip_high=0.2)),
        ({"loss": "cispo", "loss_options": {"clip_high": 4}}, "cispo", CISPOOptions(clip_high=4.0)),
        ({"loss": "sapo", "loss_options": {"tau_negative": 2}}, "sapo", SAPOOptions(tau_negative=2.0)),
    ],
)
def test_a_loss_and_its_options(algorithm: dict[str, Any], name: str, options: Any) -> None:
    settings = chosen(**algorithm)
    found = loss_of(settings.algorithm)
    assert (found.name, found.options, type(found.options)) == (name, options, type(options))
    assert list(algorithm_problems(settings.algorithm)) == []
    again = config_from_tree(parse_yaml(to_yaml(settings)))  # type: ignore[arg-type]
    assert again == settings and loss_of(again.algorithm) == found


def test_an_advantage_and_its_options() -> None:
    assert advantage_of(chosen().algorithm).options == GRPOOptions(eps=1e-4)
    assert advantage_of(chosen(advantage_options={"eps": 1e-6}).algorithm).options == GRPOOptions(eps=1e-6)
    assert advantage_of(chosen(advantage="rloo").algorithm).options is None


def test_ones_own_loss_and_advantage() -> None:
    settings = chosen(loss=TOPR, loss_options={"cap": 0.5}, advantage=MEDIAN)
    assert list(algorithm_problems(settings.algorithm)) == []
    assert loss_of(settings.algorithm).options.cap == 0.5  # type: ignore[union-attr]
    assert advantage_of(settings.algorithm).name == MEDIAN


@pytest.mark.parametrize(
    ("algorithm", "reported"),
    [
        ({"loss": "grpo"}, "algorithm.loss: 'grpo' is neither cispo, dppo, gspo, ppo, sapo nor an import path"),
        ({"advantage": "ppo"}, "algorithm.advantage: 'ppo' is neither dr_grpo, grpo, mt_grpo, reinforce_pp, r"),
        ({"loss_options": {"clip_low": 1.0}}, "algorithm.loss_options.clip_low: must be less than 1.0, not 1.0"),
        ({"loss_options": {"clip_hihg": 1.0}}, "algorithm.loss_options.clip_hihg: the loss ppo has no such option; its "
         "options are clip_low, clip_high, clip_dual"),
        ({"loss_options": {"clip_low": "0.1"}}, "algorithm.loss_options.clip_low: must be a number, not '0.1'"),
        ({"loss": "sapo", "loss_options": {"clip_low": 0.1}}, "algorithm.loss_options.clip_low: the loss sapo has no "
         "such option; its options are"),
        ({"advantage": "rloo", "advantage_options": {"eps": 1.0}}, "algorithm.advantage_options.eps: the advantage "
         "rloo has no such option; it has none"),
        ({"advantage_options": {"eps": -1.0}}, "algorithm.advantage_options.eps: must be at least 0.0, not"),
        ({"loss": "nowhere:at_all"}, "algorithm.loss: the loss 'nowhere:at_all' cannot be imported: Module"),
        ({"loss": TOPR, "loss_options": {"caps": 1.0}}, f"algorithm.loss_options.caps: the loss {TOPR} has no such"),
        ({"loss": MEDIAN}, "algorithm.loss: the loss examples.tutorials.own_loss.topr:above_median fails on 22 tokens"),
        ({"advantage": "megarl.config.derived.algorithm:advantage_of"},
        "algorithm.advantage: the advantage megarl.config."),
        ({"loss": "megarl.config.derived.algorithm:_chosen"},
        "algorithm.loss: _chosen has to take (inputs) or (inputs, opt"),
    ],
)  # fmt: skip
def test_each_mistake_has_one_message(algorithm: dict[str, Any], reported: str) -> None:
    (problem,) = algorithm_problems(chosen(**algorithm).algorithm)
    assert problem.startswith(reported)


def test_mistakes_are_found_before_anything_starts(models: dict[str, Path], data: Path) -> None:
    settings = config_from_tree(tree(models["qwen3"], data, algorithm={"loss": MEDIAN, "advantage": "best"}))
    with pytest.raises(ConfigError) as error:
        check(settings, device="cpu")
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["algorithm.loss", "algorithm.advantage"]


def test_equal_rewards_are_dropped_where_they_have_no_signal() -> None:
    assert filters_equal_rewards(chosen().algorithm) and filters_equal_rewards(
        chosen(advantage="reinforce_pp_baseline").algorithm
    )
    assert not filters_equal_rewards(chosen(advantage="reinforce_pp").algorithm)
    assert not filters_equal_rewards(chosen(filter_zero_variance=False).algorithm)
    assert filters_equal_rewards(chosen(advantage="reinforce_pp", filter_zero_variance=True).algorithm)
    assert not shaping_of(chosen(advantage="reinforce_pp")).filter_zero_variance


def test_the_objective_of_a_config() -> None:
    kl, ce = {"coef": 0.1, "estimator": "k2"}, {"coef": 0.3}
    settings = chosen(kl=kl, entropy_coef=0.2, aggregation="sequence_mean", ce=ce)
    found = objective_of(settings)
    assert (found.kl_coef, found.kl_estimator, found.entropy_coef, found.ce_coef) == (0.1, "k2", 0.2, 0.3)
    assert (found.aggregation, found.reference_stream) == ("sequence_mean", "reference_logprobs")
    assert needed_streams(settings, found) == ["advantages", "old_logprobs", "reference_logprobs"]
    assert objective_of(chosen(kl={"coef": 0.1, "where": "reward"})).kl_coef == 0.0


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [("none", None), ("observations", [0.0, 1.0, 0.0]), ("sampled", [1.0, 0.0, 1.0]), ("all", [1.0, 1.0, 1.0])],
)
def test_the_tokens_of_the_cross_entropy(tokens: str, weights: list[float] | None) -> None:
    row = trajectory_of([1, 2, 3], response_mask=[1, 0, 1])
    found = default_weights(chosen(ce={"tokens": tokens}), row)
    assert found == ({} if weights is None else {"ce_weights": weights})
    own = trajectory_of([1, 2, 3], response_mask=[1, 0, 1], ce_weights=[0.0, 0.0, 2.0])
    assert default_weights(chosen(ce={"tokens": tokens}), own) == {}
