"""A 64-bit, position-dependent digest of a bucket, in int64 arithmetic on the bucket's own device.

The payload is read twice: as 64-bit words, and as the 64-bit words that begin four bytes later. Each row of ROW_WORDS
words is multiplied by fixed random odd coefficients and summed modulo 2**64. A non-linear finaliser mixes the two sums
of a row with the row's number and the seed; the results of all rows are added up. A single reading is not enough.
Modulo 2**64 only the parity of a word's coefficient affects the word's top bit, and all coefficients are odd. So one
reading would miss swapped words that differ in the sign of their upper half. With two readings every 32-bit half is
once the lower half of a word. The seed contains version, bucket and length, so buckets of different versions have
different digests.

The digest detects corruption and programming mistakes. It is not cryptographic and does not protect against forgery.

Two functions compute the sums of the rows, with equal results. On a CPU small chunks stay in the cache between the two
readings. On an accelerator each operation is a kernel launch, so there are few chunks and large ones.

Shapes: B bytes of a flat uint8 buffer, N rows, W words of a row (at most ROW_WORDS), M words in all rows of a chunk.
Elementwise functions take tensors of any shape.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

ROW_WORDS = 32768
ROW_BYTES = ROW_WORDS * 8
_CPU_CHUNK_ROWS = 4  # 1 MiB: the data is in the cache for the second reading
_DEVICE_CHUNKS = 6  # of a payload: temporaries take a sixth of it, and 512 MiB take about 150 operations
_FEW_ROWS = 8  # 2 MiB: the sums are finalised by Python's integers, on a CPU
_MASK = (1 << 64) - 1
_MIX_A = 0x9E3779B97F4A7C15
_MIX_B = 0xBF58476D1CE4E5B9
_MIX_C = 0x94D049BB133111EB


# Writes the coefficient sums of each row into `low_N` (first reading) and `high_N` (second reading).
RowSums: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def digest(payload_B: torch.Tensor, *, version: int, bucket: int, row_sums: RowSums | None = None) -> torch.Tensor:
    """Return the digest of a contiguous uint8 payload whose size is a multiple of 8.

    `row_sums`: `cpu_row_sums` or `device_row_sums`; None: the faster one on the payload's device.

    Returns:
        int64 tensor of shape [1] on the payload's device; on an accelerator nothing is copied to the host.

    Raises:
        ValueError: the payload has another dtype, shape, size or layout in memory.
    """
    if payload_B.dtype != torch.uint8 or payload_B.dim() != 1 or payload_B.numel() % 8 or not payload_B.is_contiguous():
        raise ValueError("digest needs a contiguous 1-D uint8 tensor whose size is a multiple of 8")
    seed = seed_of(version, bucket, payload_B.numel())
    rows = -(-payload_B.numel() // ROW_BYTES)
    if rows == 0:
        return torch.tensor([_signed(seed)], dtype=torch.int64, device=payload_B.device)
    if row_sums is None:
        row_sums = cpu_row_sums if payload_B.device.type == "cpu" else device_row_sums
    low_N, high_N = torch.empty((2, rows), dtype=torch.int64, device=payload_B.device)
    row_sums(payload_B, low_N, high_N)
    if row_sums is cpu_row_sums and rows <= _FEW_ROWS:
        value = _finalise_few([int(low) for low in low_N], [int(high) for high in high_N], seed)
        return torch.tensor([_signed(value)], dtype=torch.int64)
    return _finalise(low_N, high_N, seed)


def _finalise(low_N: torch.Tensor, high_N: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the digest, int64 [1], of the sums of all rows, on their device."""
    number_N = torch.arange(1, low_N.numel() + 1, dtype=torch.int64, device=low_N.device)
    mixed_N = _mix(low_N + number_N * _signed(_MIX_A) + _signed(seed))
    mixed_N = _mix(mixed_N ^ (high_N + number_N * _signed(_MIX_C)))
    return _mix(mixed_N.sum().reshape(1) + _signed(seed))


def _finalise_few(low: Sequence[int], high: Sequence[int], seed: int) -> int:
    """Return the same digest, unsigned. For a few rows this takes a tenth of the time of 40 torch operations."""
    total = 0
    for number, (low_sum, high_sum) in enumerate(zip(low, high, strict=True), start=1):
        mixed = _mix_int((low_sum + number * _MIX_A + seed) & _MASK)
        total += _mix_int(mixed ^ ((high_sum + number * _MIX_C) & _MASK))
    return _mix_int((total + seed) & _MASK)


def seed_of(version: int, bucket: int, nbytes: int) -> int:
    """Return the unsigned 64-bit seed of one bucket of one version."""
    state = 0x6D656761726C0001
    for value in (version, bucket, nbytes):
        state = _mix_int((state ^ (value & _MASK)) + _MIX_A & _MASK)
    return state


def cpu_row_sums(payload_B: torch.Tensor, low_N: torch.Tensor, high_N: torch.Tensor) -> None:
    """Compute the row sums by torch's integer matrix-vector product, which exists for CPU only."""
    for_low_W, for_high_W = _coefficients(payload_B.device)
    for begin, end, width in _chunks(payload_B.numel(), _CPU_CHUNK_ROWS):
        rows = slice(begin // ROW_BYTES, -(-end // ROW_BYTES))
        low_N[rows] = torch.mv(payload_B[begin:end].view(torch.int64).view(-1, width), for_low_W[:width])
        if end == payload_B.numel():
            words_M = _shifted_words(payload_B, begin, end)
        else:  # a view, which other devices do not allow: its words are not aligned
            words_M = torch.from_numpy(payload_B.numpy()[begin + 4 : end + 4].view(np.int64))
        high_N[rows] = torch.mv(words_M.view(-1, width), for_high_W[:width])


def device_row_sums(payload_B: torch.Tensor, low_N: torch.Tensor, high_N: torch.Tensor) -> None:
    """Compute the row sums in few operations, on any device. Temporaries take one chunk at a time."""
    for_low_W, for_high_W = _coefficients(payload_B.device)
    for begin, end, width in _chunks(payload_B.numel(), -(-low_N.numel() // _DEVICE_CHUNKS)):
        rows = slice(begin // ROW_BYTES, -(-end // ROW_BYTES))
        words_NW = payload_B[begin:end].view(torch.int64).view(-1, width)
        torch.sum(words_NW * for_low_W[:width], 1, out=low_N[rows])
        words_NW = _shifted_words(payload_B, begin, end).view(-1, width)
        torch.sum(words_NW.mul_(for_high_W[:width]), 1, out=high_N[rows])


def _chunks(total: int, chunk_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, last byte + 1, words per row) of the chunks; a row that is not full is a chunk of its own."""
    whole = total // ROW_BYTES * ROW_BYTES
    for begin in range(0, whole, chunk_rows * ROW_BYTES):
        yield begin, min(begin + chunk_rows * ROW_BYTES, whole), ROW_WORDS
    if whole < total:
        yield whole, total, (total - whole) // 8


def _shifted_words(payload_B: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return a copy of bytes [begin + 4, end + 4) as int64 words [M], with zeros behind the payload."""
    if end == payload_B.numel():
        return torch.cat([payload_B[begin + 4 :], payload_B.new_zeros(4)]).view(torch.int64)
    return payload_B[begin + 4 : end + 4].clone().view(torch.int64)


@functools.lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two vectors of ROW_WORDS odd pseudo-random int64, equal on every device and in every version of torch."""
    number_2W = torch.arange(1, 2 * ROW_WORDS + 1, dtype=torch.int64, device=device)
    odd_2W = _mix(number_2W * _signed(_MIX_A)) | 1
    return odd_2W[:ROW_WORDS].clone(), odd_2W[ROW_WORDS:].clone()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of splitmix64, elementwise on int64 (a bijection)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_B)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_C)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift without sign extension; torch's own shift of int64 extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(x: int) -> int:
    """Apply `_mix` to one unsigned 64-bit number."""
    x = (x ^ (x >> 30)) * _MIX_B & _MASK
    x = (x ^ (x >> 27)) * _MIX_C & _MASK
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    """Return the int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
