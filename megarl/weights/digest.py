"""A 64-bit, position-dependent digest of a bucket, in int64 arithmetic on the bucket's own device.

The payload is read twice: as 64-bit words, and as the 64-bit words that begin four bytes later. Each row of ROW_WORDS
words is multiplied by fixed random odd coefficients and summed modulo 2**64. A non-linear finaliser mixes the two sums
of a row with the row's number and the seed; the results of all rows are added up. Two readings are necessary: modulo
2**64 only the parity of its coefficient acts on the top bit of a word, and all coefficients are odd, so a single
reading would miss swapped words that differ in the sign of their upper half. Every 32-bit half is the lower half of a
word in one of the two readings. The seed contains version, bucket and length, so that a bucket of another version has
another digest.

The digest detects corruption and programming mistakes. It is not cryptographic and does not protect against forgery.

Shapes: B bytes of a flat uint8 buffer, N rows, W words of a row (at most ROW_WORDS).
"""

from __future__ import annotations

import functools

import numpy as np
import torch

ROW_WORDS = 32768
_CHUNK_ROWS = 4  # 1 MiB at a time: the data is in the cache for the second reading, and temporaries are small
_MASK = (1 << 64) - 1
_MIX_A = 0x9E3779B97F4A7C15
_MIX_B = 0xBF58476D1CE4E5B9
_MIX_C = 0x94D049BB133111EB


def digest(payload_B: torch.Tensor, *, version: int, bucket: int) -> torch.Tensor:
    """Return the digest of a contiguous uint8 payload whose size is a multiple of 8.

    Returns:
        int64 tensor of shape [1] on the payload's device; nothing is copied to the host.

    Raises:
        ValueError: the payload has another dtype, shape, size or layout in memory.
    """
    if payload_B.dtype != torch.uint8 or payload_B.dim() != 1 or payload_B.numel() % 8 or not payload_B.is_contiguous():
        raise ValueError("digest needs a contiguous 1-D uint8 tensor whose size is a multiple of 8")
    seed = seed_of(version, bucket, payload_B.numel())
    words = payload_B.numel() // 8
    if words == 0:
        return torch.tensor([_signed(seed)], dtype=torch.int64, device=payload_B.device)
    rows = -(-words // ROW_WORDS)
    low_N = torch.empty(rows, dtype=torch.int64, device=payload_B.device)
    high_N = torch.zeros(rows, dtype=torch.int64, device=payload_B.device)
    _row_sums(payload_B, low_N, high_N)
    number_N = torch.arange(1, rows + 1, dtype=torch.int64, device=payload_B.device)
    mixed_N = _mix(low_N + number_N * _signed(_MIX_A) + _signed(seed))
    mixed_N = _mix(mixed_N ^ (high_N + number_N * _signed(_MIX_C)))
    return _mix(mixed_N.sum().reshape(1) + _signed(seed))


def seed_of(version: int, bucket: int, nbytes: int) -> int:
    """Return the unsigned 64-bit seed of one bucket of one version."""
    state = 0x6D656761726C0001
    for value in (version, bucket, nbytes):
        state = _mix_int((state ^ (value & _MASK)) + _MIX_A & _MASK)
    return state


def _row_sums(payload_B: torch.Tensor, low_N: torch.Tensor, high_N: torch.Tensor) -> None:
    """Write the coefficient sums of each row into `low_N` (first reading) and `high_N` (second reading)."""
    for_low_W, for_high_W = _coefficients(payload_B.device)
    row_bytes = ROW_WORDS * 8
    total = payload_B.numel()
    for start in range(0, total, row_bytes * _CHUNK_ROWS):
        stop = min(start + row_bytes * _CHUNK_ROWS, total)
        whole = start + (stop - start) // row_bytes * row_bytes
        for begin, end, width in ((start, whole, ROW_WORDS), (whole, stop, (stop - whole) // 8)):
            if begin == end:
                continue
            rows = slice(begin // row_bytes, begin // row_bytes + (end - begin) // (width * 8))
            low_N[rows] = _matvec(payload_B[begin:end].view(torch.int64).view(-1, width), for_low_W[:width])
            high_N[rows] = _shifted_sums(payload_B, begin, end, width, for_high_W)


def _shifted_sums(
    payload_B: torch.Tensor, begin: int, end: int, width: int, coefficients_W: torch.Tensor
) -> torch.Tensor:
    """Return the sums [N] of the rows in bytes [begin, end), read four bytes later, with zeros behind the payload."""
    if end == payload_B.numel():
        words = torch.cat([payload_B[begin + 4 :], payload_B.new_zeros(4)]).view(torch.int64)
    elif payload_B.device.type == "cpu":  # an unaligned view costs nothing here, and is impossible on other devices
        words = torch.from_numpy(payload_B.numpy()[begin + 4 : end + 4].view(np.int64))
    else:
        words = payload_B[begin + 4 : end + 4].clone().view(torch.int64)
    return _matvec(words.view(-1, width), coefficients_W[:width])


def _matvec(rows_NW: torch.Tensor, coefficients_W: torch.Tensor) -> torch.Tensor:
    """Return the product [N], int64 modulo 2**64. torch has an integer matrix-vector product for CPU only."""
    if rows_NW.device.type == "cpu":
        return torch.mv(rows_NW, coefficients_W)
    return (rows_NW * coefficients_W).sum(1)


@functools.lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two vectors of ROW_WORDS odd pseudo-random int64, equal on every device and in every version of torch."""
    number = torch.arange(1, 2 * ROW_WORDS + 1, dtype=torch.int64, device=device)
    values = _mix(number * _signed(_MIX_A)) | 1
    return values[:ROW_WORDS].clone(), values[ROW_WORDS:].clone()


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
