"""Context-parallel ranks against one process, and each rule of it broken once. Gradients: test_layouts.py as well."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.trainer.batch import pack, unzigzag, zigzag
from tests.support.losses.samples import train_sample
from tests.support.models.tensors import merge, worst
from tests.support.ranks.models.context_mistakes import MUTATIONS
from tests.support.trainer.rank_fixtures import OnRanks

EXACT = 1e-5
FOUND = 1e-3  # of a mistake: two orders of magnitude above the bound


def by_sample(ranks: list[Any]) -> dict[int, torch.Tensor]:
    merged: dict[int, torch.Tensor] = {}
    for result in ranks:
        for index, logprobs_R in result:
            assert torch.equal(merged.setdefault(index, logprobs_R), logprobs_R), "ranks of a replica differ"
    return merged


@pytest.mark.world
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("ranks", "model", "layout"),
    [
        (2, "dense", {"context": 2}),
        *(
            pytest.param(ranks, model, layout, marks=pytest.mark.slow)
            for ranks, model, layout in (
                (4, "dense", {"context": 4}),
                (4, "dense", {"context": 2, "tensor": 2, "sequence": True}),
                (4, "dense", {"context": 2, "pipeline": 2, "virtual_pipeline": 2}),
                (2, "moe", {"context": 2, "expert": 2}),
                (2, "latent", {"context": 2}),
                (4, "window", {"context": 4}),
                (4, "biased", {"context": 2}),
            )
        ),
    ],
)
def test_logprobs_are_those_of_one_process(
    on_ranks: OnRanks, ranks: int, model: str, layout: dict[str, int], reference: bool
) -> None:
    got, one = (
        by_sample(on_ranks(size, "training.policy:logprobs", model, layout=split, reference=reference))
        for size, split in ((ranks, layout), (1, {}))
    )
    assert got.keys() == one.keys()
    assert max(float((got[index] - one[index]).abs().max()) for index in one) <= EXACT


@pytest.mark.world
@pytest.mark.parametrize("what", MUTATIONS)
def test_each_mistake_changes_the_gradients_or_the_loss(
    on_ranks: OnRanks, trained: Callable[..., Any], what: str
) -> None:
    one = trained(1, "dense")
    results = on_ranks(2, "models.context_mistakes:mutated", what=what)
    of_gradients = worst(merge([result["gradients"] for result in results]), one["gradients"])
    (loss,), (expected,) = results[0]["metrics"], one["metrics"]
    error = max(of_gradients, abs(loss["loss"] / expected["loss"] - 1))
    assert error <= EXACT if what == "none" else error > FOUND, error


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_the_ranks_hold_each_token_and_predict_each_response_token_once(
    shapes: list[tuple[int, int]], size: int, align: int
) -> None:
    token = iter(range(1, 1000))
    samples = [
        train_sample(
            str(number), [next(token) for _ in range(prompt)], [next(token) for _ in range(response)],
        )
        for number, (prompt, response) in enumerate(shapes)
    ]  # fmt: skip
    order = list(range(len(samples)))
    parts = [pack(samples, order, align, [], None, (rank, size)) for rank in range(size)]
    whole = pack(samples, order, streams=[])
    held = [token for part in parts for token in part.input_ids_1T[0].tolist() if token]
    assert sorted(held) == sorted(whole.input_ids_1T[0].tolist()) if samples else not held
    predicted = torch.cat([part.own_O for part in parts if part.own_O is not None])
    assert sorted(predicted.tolist()) == list(range(len(whole.targets_R)))
    for part in parts:
        tokens = part.input_ids_1T.shape[1]
        assert tokens % align == 0 and torch.equal(part.targets_R, whole.targets_R)
        assert tokens == len(zigzag(part.cu_seqlens, 0, size)) == int(part.cu_seqlens[-1]) / size
        padding = 0 if part.padding_1T is None else int(part.padding_1T.sum())
        assert part.tokens == tokens - padding
        if samples:  # the row that holds a token predicts the next one, which may be on another rank
            assert torch.equal(part.input_ids_1T[0, part.rows_O] + 1, part.targets_R[part.own_O])
    assert sum(part.tokens for part in parts) == whole.tokens
    assert len({part.padding_1T is None for part in parts}) == 1
    in_order = unzigzag([part.input_ids_1T[0] for part in parts], parts[0].cu_seqlens)
    assert in_order[in_order > 0].tolist() == (whole.input_ids_1T[0].tolist() if samples else [])


def test_a_rank_holds_its_chunk_from_the_front_and_from_the_back() -> None:
    bounds = torch.tensor([0, 8, 12])
    assert [zigzag(bounds, rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
