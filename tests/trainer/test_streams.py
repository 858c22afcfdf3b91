"""A stream is declared once, and then reaches the loss: through queue and dump, every layout, and packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.queue.dump import read_batch, write_batch
from megarl.queue.rows import decode, encode
from megarl.queue.streams import STREAMS, Stream, StreamRegistry
from megarl.queue.trajectory import Trajectory, VersionSpan
from tests.support.ranks.streams import WEIGHT, declared
from tests.support.tensors import merge, worst

CASE = "tests.support.ranks.streams:gradients_of_weighted_likelihood"


@pytest.fixture(autouse=True)
def _declared() -> Iterator[None]:
    with declared():
        yield


def trajectories(*, zero: bool = False) -> list[Trajectory]:
    """Ragged, with given tokens in the middle of some; the weights differ from token to token and sample to sample."""
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


def test_through_queue_and_dump(tmp_path: Path) -> None:
    rows = trajectories()
    rows = [*rows[:-1], replace(rows[-1], streams={})]  # a trajectory without it gets the declared fill
    filled = [*rows[:-1], replace(rows[-1], streams={WEIGHT.name: [1.0] * 4})]
    assert [row.streams for row in decode(*encode(rows))] == [
        {WEIGHT.name: torch.tensor(row.streams[WEIGHT.name]).tolist()} for row in filled
    ]
    assert [row.response_mask for row in decode(*encode(rows))] == [row.response_mask for row in rows]
    write_batch(tmp_path, 0, 0, rows)
    read = read_batch(tmp_path, 0).trajectories
    assert [row.response_mask for row in read] == [row.response_mask for row in rows]
    assert [row.streams for row in read] == [row.streams for row in decode(*encode(rows))]
    assert [tag.sampled_tokens for tag in read_batch(tmp_path, 0).tags] == [5, 7, 2, 5, 4]


def test_a_stream_of_another_length_is_refused() -> None:
    rows = trajectories()
    with pytest.raises(ValueError, match=r"sample 0:0: stream 'test_weight' has 1 values for 5 response tokens"):
        encode([replace(rows[0], streams={WEIGHT.name: [1.0]})])


def test_a_name_has_one_declaration() -> None:
    registry = StreamRegistry(Stream("a", "One."))
    registry.declare(Stream("a", "One."))
    with pytest.raises(ValueError, match="'a' is declared already"):
        registry.declare(Stream("a", "Another."))
    assert {stream.name for stream in STREAMS.from_rollout} >= {WEIGHT.name}


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
