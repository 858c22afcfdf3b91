"""Every option of the loss reaches the policy's gradient, which is that of the padded reference.

Each case differs from the run without its option, so a policy that dropped the option would be seen.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.trainer.batch import TrainSample
from tests.support.losses.loss_batches import MAX_TOKENS, loss_spec
from tests.support.losses.rl_problem import CLIP, ENTROPY, KL, padded_gradients
from tests.support.models.tensors import worst

pytestmark = pytest.mark.world

LENGTH = {"sampling__max_tokens": MAX_TOKENS}  # that of the padded reference
BASE = loss_spec(clip_low=CLIP, clip_high=CLIP, kl_coef=KL, entropy_coef=ENTROPY)
GSPO = {
    "algorithm__loss": "gspo",
    "algorithm__loss_options__clip_low": 0.02,
    "algorithm__loss_options__clip_high": 0.04,
}

# Configuration as a user writes it, and the fields of the objective that it stands for.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gspo": (GSPO, {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.04}),
    "clip_low": ({"algorithm__loss_options__clip_low": 0.1}, {"clip_low": 0.1}),
    "clip_high": ({"algorithm__loss_options__clip_high": 0.4}, {"clip_high": 0.4}),
    "clip_dual": ({"algorithm__loss_options__clip_dual": 1.1}, {"clip_dual": 1.1}),
    "sequence_mean": ({"algorithm__aggregation": "sequence_mean"}, {"aggregation": "sequence_mean"}),
    "constant_length": ({"algorithm__aggregation": "constant_length"}, {"aggregation": "constant_length"}),
    "k1": ({"algorithm__kl__estimator": "k1"}, {"kl_estimator": "k1"}),
    "k2": ({"algorithm__kl__estimator": "k2"}, {"kl_estimator": "k2"}),
    "kl_coef": ({"algorithm__kl__coef": 0.2}, {"kl_coef": 0.2}),
    "kl_in_the_reward": ({"algorithm__kl__where": "reward"}, {"kl_coef": 0.0}),
    "no_entropy": ({"algorithm__entropy_coef": 0.0}, {"entropy_coef": 0.0}),
}
DROPPED = 1e-3  # least change of some tensor's gradient by an option


@pytest.mark.parametrize("case", ["base", *CASES])
def test_the_gradient_is_that_of_the_padded_reference(
    trained: Callable[..., Any],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
    case: str,
) -> None:
    changes, fields = CASES.get(case, ({}, {}))
    got = trained(1, "dense", **LENGTH, **changes)
    loss, gradients = padded_gradients(model_dir("dense"), samples_of("dense"), replace(BASE, **fields))
    assert got["metrics"][0]["loss"] == pytest.approx(loss, rel=1e-5, abs=2e-7)  # a sum of terms that nearly cancel
    assert worst(got["gradients"], gradients) <= 1e-5
    if changes:
        without = trained(1, "dense", **LENGTH)["gradients"]
        assert worst(got["gradients"], without) > DROPPED, "the option makes no difference here"


def test_all_options_at_once_over_two_replicas(
    trained: Callable[..., Any], model_dir: Callable[[str], Path], samples_of: Callable[[str], list[TrainSample]]
) -> None:
    names = ("gspo", "clip_dual", "sequence_mean", "k2")
    changes = {key: value for name in names for key, value in CASES[name][0].items()}
    fields = {key: value for name in names for key, value in CASES[name][1].items()}
    got = trained(2, "dense", **LENGTH, **changes)
    _, gradients = padded_gradients(model_dir("dense"), samples_of("dense"), replace(BASE, **fields))
    assert worst(got["gradients"], gradients) <= 1e-5
