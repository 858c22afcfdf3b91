"""A declared stream reaches the loss through packing, under every layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.queue.row_format import decode, encode
from megarl.queue.trajectory import Trajectory, VersionSpan
from tests.support.models.tensors import merge, worst
from tests.support.rollout.declared_streams import WEIGHT, declared

CASE = "tests.support.ranks.sync.streams:gradients_of_weighted_likelihood"


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with declared():
        yield


def trajectories(*, zero: bool = False) -> list[Trajectory]:
    """Return trajectories of different lengths, some with inserted tokens; every token has a weight of its own."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number, (prompt, response) in enumerate([(3, 5), (1, 9), (6, 2), (4, 7), (2, 4)]):
        ids = torch.randint(1, 90, (prompt + response,), generator=generator).tolist()
        weights = torch.rand(response, generator=generator).tolist()
        rows.append(
            Trajectory(
                group_id=0,
                sample_index=number,
                prompt_ids=ids[:prompt],
                response_ids=ids[prompt:],
                rollout_logprobs=[-1.0] * response,
                versions=(VersionSpan(0, 0, response),),
                finish_reason="stop",
                reward=0.0,
                response_mask=[int(not (number % 2 and 1 <= token < 3)) for token in range(response)],
                streams={WEIGHT.name: [0.0] * response if zero else weights},
            )
        )
    return rows


@pytest.mark.world
@pytest.mark.parametrize(
    ("ranks", "layout", "changes"),
    [
        pytest.param(2, {"tensor": 2, "sequence": True}, {}, id="tp2-sp"),
        pytest.param(2, {"pipeline": 2}, {"trainer__micro_batch_tokens": 16}, id="pp2"),
        pytest.param(2, {}, {}, id="dp2"),
        pytest.param(4, {"tensor": 2, "pipeline": 2}, {"trainer__micro_batch_tokens": 16}, id="tp2-pp2"),
    ],
)
def test_into_a_loss_under_every_layout(
    world: Callable[[int], Any],
    model_dir: Callable[[str], Path],
    ranks: int,
    layout: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    rows = decode(*encode(trajectories()))
    arguments: dict[str, Any] = {"model_dir": model_dir("dense"), "rows": rows}
    (alone,) = world(1).run(CASE, layout={}, **arguments)
    results = world(ranks).run(CASE, layout=layout, **arguments, **changes)
    assert [result["loss"] for result in results] == [pytest.approx(alone["loss"], rel=1e-6)] * ranks
    assert worst(merge([result["gradients"] for result in results]), alone["gradients"]) <= 1e-5


@pytest.mark.world
def test_the_stream_is_what_the_loss_is_made_of(world: Callable[[int], Any], model_dir: Callable[[str], Path]) -> None:
    rows = decode(*encode(trajectories(zero=True)))
    (result,) = world(1).run(CASE, layout={}, model_dir=model_dir("dense"), rows=rows)
    assert result["loss"] == 0.0
    assert all(not gradient.any() for gradient in result["gradients"].values())
