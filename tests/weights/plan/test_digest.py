"""The digest sees what a broken sync does to bytes, and is what an independent formula says it is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.plan import digest as module
from megarl.weights.plan.digest import ROW_BYTES, ROW_WORDS, cpu_row_sums, device_row_sums, digest, seed_of
from tests.support.measures.operations import CountOperations

MASK = (1 << 64) - 1
WORDS = 3 * ROW_WORDS * 2 + 777  # several chunks, a partial row


def value(payload: torch.Tensor, version: int = 3, bucket: int = 5, row_sums: module.RowSums | None = None) -> int:
    return int(digest(payload, version=version, bucket=bucket, row_sums=row_sums).item())


def random_payload(words: int = WORDS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (words * 8,), dtype=torch.uint8, generator=generator)


def reference(payload: torch.Tensor, version: int, bucket: int) -> int:
    """The formula of the docstring in Python integers."""
    data = payload.numpy().tobytes()
    seed = seed_of(version, bucket, len(data))
    if not data:
        return seed
    words = np.frombuffer(data, dtype="<u8").tolist()
    shifted = np.frombuffer(data[4:] + b"\0" * 4, dtype="<u8").tolist()
    coefficients = [[int(c) & MASK for c in vector.tolist()] for vector in module._coefficients(torch.device("cpu"))]
    total = 0
    for row in range(-(-len(words) // ROW_WORDS)):
        span = slice(row * ROW_WORDS, (row + 1) * ROW_WORDS)
        low = sum(w * c for w, c in zip(words[span], coefficients[0], strict=False)) & MASK
        high = sum(w * c for w, c in zip(shifted[span], coefficients[1], strict=False)) & MASK
        mixed = module._mix_int(low + (row + 1) * module._MIX_A + seed & MASK)
        total += module._mix_int(mixed ^ (high + (row + 1) * module._MIX_C & MASK))
    return module._mix_int(total + seed & MASK)


@pytest.mark.parametrize("row_sums", [cpu_row_sums, device_row_sums])
@pytest.mark.parametrize(
    "words", [0, 1, 2, 100, ROW_WORDS, ROW_WORDS + 1, 4 * ROW_WORDS, 4 * ROW_WORDS + 3, WORDS, 9 * ROW_WORDS]
)
def test_equals_the_formula(words: int, row_sums: module.RowSums) -> None:
    payload = random_payload(words)
    assert int(digest(payload, version=3, bucket=5, row_sums=row_sums)) & MASK == reference(payload, 3, 5)


def test_values_do_not_change() -> None:
    """Trainer and engines of one run may be of different checkouts: a new value is a new format."""
    payload = (torch.arange(3 * ROW_BYTES + 1000) * 2654435761 % 251).to(torch.uint8)
    assert value(payload, 7, 11) == -6314604093895602878


def test_a_small_bucket_on_a_cpu_takes_few_operations() -> None:
    """A sync of many small buckets would spend most of its host time on them."""
    payload = random_payload(1000)
    value(payload)
    with CountOperations() as counter:
        value(payload)
    assert counter.operations <= 30


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 14 * ROW_WORDS), st.integers(0, 3))
def test_the_way_of_accelerators_gives_the_same(words: int, seed: int) -> None:
    payload = random_payload(words, seed)
    assert int(digest(payload, version=3, bucket=5, row_sums=device_row_sums)) == value(payload)


@pytest.mark.parametrize("rows", [1, 5, 64, 2048])
def test_an_accelerator_gets_few_operations_and_small_temporaries(rows: int) -> None:
    """Each operation is a kernel launch; 2048 rows are a bucket of 512 MiB. Its size does not change the number."""
    payload = torch.zeros(rows * ROW_BYTES + (8 if rows == 5 else 0), dtype=torch.uint8)
    digest(payload[:8], version=3, bucket=5)  # the coefficients are made once
    with CountOperations() as counter:
        digest(payload, version=3, bucket=5, row_sums=device_row_sums)
    assert counter.operations <= 192
    assert counter.peak_bytes <= max(payload.numel() / 4, 1.1 * ROW_BYTES)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, WORDS * 8 - 1), st.integers(0, 7), st.integers(0, 2))
def test_a_flipped_bit_is_seen(byte: int, bit: int, seed: int) -> None:
    payload = random_payload(seed=seed)
    before = value(payload)
    payload[byte] ^= 1 << bit
    assert value(payload) != before


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2 * WORDS - 1), st.integers(0, 2 * WORDS - 1))
def test_swapped_floats_are_seen(i: int, j: int) -> None:
    payload = random_payload()
    words = payload.view(torch.int32)
    words[i] = 17
    words[j] = 18
    before = value(payload)
    words[[i, j]] = words[[j, i]]
    assert (value(payload) != before) == (i != j)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2 * WORDS - 1), min_size=2, max_size=8, unique=True))
def test_moved_signs_are_seen(positions: list[int]) -> None:
    """Only top bits change: products modulo 2**64 alone would hardly notice."""
    payload = torch.ones(2 * WORDS, dtype=torch.float32)
    payload[positions[::2]] = -1.0
    before = value(payload.view(torch.uint8))
    payload[positions] = -payload[positions]
    assert value(payload.view(torch.uint8)) != before


def test_checkerboard_of_signs_is_seen() -> None:
    payload = torch.ones(4 * ROW_WORDS, 2)
    payload[[0, ROW_WORDS], 1] = torch.tensor([1.0, -1.0])
    payload[[1, ROW_WORDS + 1], 1] = torch.tensor([-1.0, 1.0])
    before = value(payload.view(-1).view(torch.uint8))
    payload[[0, 1, ROW_WORDS, ROW_WORDS + 1], 1] *= -1
    assert value(payload.view(-1).view(torch.uint8)) != before


def swapped(payload: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([payload[size : 2 * size], payload[:size], payload[2 * size :]])


def zero_filled(payload: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([payload[:16], torch.zeros(size, dtype=torch.uint8), payload[16 + size :]])


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        (swapped, (8, 4096, ROW_WORDS * 8, ROW_WORDS * 16)),
        (torch.roll, (1, 4, 8, 16, ROW_WORDS * 8)),
        (zero_filled, (8, 1000, ROW_WORDS * 8)),
    ],
)
def test_moved_and_lost_bytes_are_seen(
    change: Callable[[torch.Tensor, int], torch.Tensor], sizes: tuple[int, ...]
) -> None:
    payload = random_payload()
    assert len({value(payload), *(value(change(payload, size)) for size in sizes)}) == 1 + len(sizes)


def test_missing_zeros_at_the_end_are_seen() -> None:
    payload = random_payload(100)
    payload[-80:] = 0
    assert value(payload) != value(payload[:-80].clone())


def test_replay_is_seen() -> None:
    """The right bytes of another version, or of another bucket, are the wrong bytes."""
    payload = random_payload(1000)
    assert len({value(payload, v, b) for v in range(8) for b in range(8)}) == 64


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        digest(torch.zeros(7, dtype=torch.uint8), version=0, bucket=0)
    with pytest.raises(ValueError, match="uint8"):
        digest(torch.zeros(8), version=0, bucket=0)
