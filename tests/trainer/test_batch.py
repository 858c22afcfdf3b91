"""Packing into THD micro-batches, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.queue.images import ImageRef
from megarl.trainer.batch import TrainSample, check_samples, common_streams, pack, unpack
from tests.support.losses.samples import train_sample as sample


def test_two_sequences_end_to_end() -> None:
    samples = [
        sample("a", [5, 6], [7, 8, 9], advantage=2.0, loss_mask=torch.tensor([1, 0, 1])),
        sample("unused", [1], [1]),
        sample("b", [3], [4], advantage=-1.0),
    ]
    batch = pack(samples, [2, 0])
    assert batch.input_ids_1T.tolist() == [[3, 4, 5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4]]
    assert batch.cu_seqlens.tolist() == [0, 2, 7] and batch.max_seqlen == 5
    # The row that holds token t predicts token t + 1.
    assert batch.rows_O.tolist() == [0, 3, 4, 5]
    assert batch.targets_R.tolist() == [4, 7, 8, 9]
    assert batch.input_ids_1T[0, batch.rows_O + 1].tolist() == batch.targets_R.tolist()
    assert batch.response_cu_seqlens.tolist() == [0, 1, 4]
    assert batch.streams["advantages"].tolist() == [-1.0, 2.0, 2.0, 2.0]
    assert batch.mask_R.tolist() == [True, True, False, True]
    assert list(batch.streams) == ["advantages"] and batch.tokens == 7 and not batch.is_empty
    assert [part.tolist() for part in unpack(batch.targets_R, samples, [2, 0])] == [[4], [7, 8, 9]]


def test_sequence_parallel_padding_is_a_sequence_of_its_own() -> None:
    batch = pack([sample("a", [5, 6], [7])], [0], align=4)
    assert batch.input_ids_1T.tolist() == [[5, 6, 7, 0]]
    assert batch.cu_seqlens.tolist() == [0, 3, 4] and batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert batch.rows_O.tolist() == [1] and batch.tokens == 3
    mask = batch.padding_1T
    assert mask is not None and mask.tolist() == [[False, False, False, True]]
    assert pack([sample("a", [5, 6], [7, 8])], [0], align=4).padding_1T is None


@pytest.mark.parametrize("align", [1, 4])
def test_an_empty_micro_batch_weighs_nothing(align: int) -> None:
    batch = pack([sample("a", [1], [2], old_logprobs=torch.zeros(1))], [], align=align)
    assert batch.is_empty and batch.tokens == 0
    assert batch.input_ids_1T.shape == (1, align) and batch.cu_seqlens.tolist() == [0, align]
    assert batch.mask_R.tolist() == [False] and batch.rows_O.tolist() == [0]
    mask = batch.padding_1T
    assert mask is not None and mask.tolist() == [[True] * align]
    assert batch.streams["old_logprobs"].tolist() == [0.0]
    assert unpack(batch.targets_R, [], []) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6), st.sampled_from([1, 2, 4]))
def test_every_response_token_has_the_row_before_it(shapes: list[tuple[int, int]], align: int) -> None:
    token = iter(range(1000))
    samples = [
        sample(
            str(number),
            [next(token) for _ in range(prompt)],
            [next(token) for _ in range(response)],
            old_logprobs=torch.full((response,), float(number)),
        )
        for number, (prompt, response) in enumerate(shapes)
    ]
    order = list(reversed(range(len(samples))))
    batch = pack(samples, order, align)
    assert batch.input_ids_1T.shape[1] % align == 0
    assert batch.input_ids_1T.shape[1] - sum(s.length for s in samples) < align
    assert torch.equal(batch.input_ids_1T[0, batch.rows_O] + 1, batch.targets_R)
    pieces = unpack(batch.streams["old_logprobs"], samples, order)
    for index, piece in zip(order, pieces, strict=True):
        assert torch.equal(piece, samples[index].streams["old_logprobs"])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (sample("x", [], [1]), "x: prompt and response need"),
        (sample("x", [1], []), "x: prompt and response need"),
        (sample("x", [1], [10]), "x: a token id is outside the vocabulary of 10"),
        (sample("x", [-1], [1]), "x: a token id is outside"),
        (sample("x", [1], [1, 2], old_logprobs=torch.zeros(1)), r"old_logprobs has shape \(1,\).* 2 tokens"),
        (sample("x", [1], [1, 2], loss_mask=torch.ones(3)), "loss_mask has shape"),
    ],
)
def test_bad_samples_are_refused(broken: TrainSample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_samples([sample("good", [1], [2]), broken], vocab_size=10)


def test_an_image_behind_its_sample_is_refused() -> None:
    """Context parallelism pads each sample, so that its positions could still be made."""
    broken = replace(sample("x", [1], [2]), images=(ImageRef("a", 1, 1, 2),))
    with pytest.raises(ValueError, match="x: its last image ends behind its 2 tokens"):
        check_samples([broken], vocab_size=10, sees=True)


def test_only_streams_that_all_samples_have_are_packed() -> None:
    both = [
        sample("a", [1], [2], old_logprobs=torch.zeros(1), reference_logprobs=torch.zeros(1)),
        sample("b", [1], [2], old_logprobs=torch.zeros(1)),
    ]
    assert common_streams(both) == ["advantages", "old_logprobs"] == sorted(pack(both, [0]).streams)
    assert common_streams([]) == []
    with pytest.raises(KeyError, match="reference_logprobs"):
        pack(both, [0, 1], streams=["reference_logprobs"])


def test_an_undeclared_stream_is_refused() -> None:
    with pytest.raises(KeyError, match="'hunch' is not declared; declared are old_logprobs"):
        pack([sample("a", [1], [2], hunch=torch.zeros(1))], [0])


def test_samples_with_temperatures_of_their_own() -> None:
    samples = [replace(sample("a", [1], [2, 3]), temperature=0.6), replace(sample("b", [1, 2], [3]), temperature=1.0)]
    packed = pack(samples, [1, 0]).temperature_R
    assert packed is not None and packed.tolist() == torch.tensor([1.0, 0.6, 0.6]).tolist()
    assert pack(samples, []).temperature_R is None and pack([sample("c", [1], [2])], [0]).temperature_R is None
    with pytest.raises(ValueError, match="2 of 3 samples have a temperature"):
        pack([*samples, sample("c", [1], [2])], [0, 1, 2])
