"""The defaults of the policy's wrappers and modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.world

ON = {"grad": True, "param": True, "optimizer": True, "gathers_in_forward": True, "no_sync": True}
OFF = dict.fromkeys(ON, False)
PLAIN = {"trainer__optimizer__distributed": False}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ON),
        (PLAIN, OFF | {"grad": True, "no_sync": True}),  # nothing to gather without the distributed optimizer
        ({"megatron__ddp": {"overlap_grad_reduce": False}}, OFF),
        ({"megatron__ddp": {"overlap_param_gather": False}}, ON | {"param": False, "optimizer": False,
                                                                   "gathers_in_forward": False}),
    ],
    ids=["default", "not distributed", "no reduction", "no gather"],
)  # fmt: skip
def test_reduction_and_gather_overlap_where_megatron_allows_it(
    world: Callable[[int], Any],
    model_dir: Callable[[str], Path],
    changes: dict[str, Any],
    expected: dict[str, bool],
) -> None:
    found = world(2).run(
        "tests.support.ranks.models.gpu_defaults:ddp_settings", model_dir=model_dir("dense"), **changes
    )
    assert found == [expected, expected]


def test_weight_gradients_are_fused_in_the_policy_only(
    world: Callable[[int], Any], model_dir: Callable[[str], Path]
) -> None:
    """The frozen reference has no gradients; the switch reaches all four linear modules of each layer."""
    [(policy, reference, count)] = world(1).run(
        "tests.support.ranks.models.gpu_defaults:fused_flags", model_dir=model_dir("dense")
    )
    assert (policy, reference) == ({True}, {False}) and count % 4 == 0 and count > 0


def test_norms_and_biases_do_not_decay(world: Callable[[int], Any], model_dir: Callable[[str], Path]) -> None:
    """Layouts agree with each other also where all of them decay what should not."""
    [found] = world(1).run("tests.support.ranks.models.gpu_defaults:undecayed", model_dir=model_dir("dense"))
    assert found == {"decayed": {2}, "kept": {1}}
