"""A 64-bit, position-dependent digest of a bucket, in int64 arithmetic on the bucket's own device.

The payload is read twice: as 64-bit words, and as the 64-bit words that begin four bytes later. A row of
ROW_WORDS words is multiplied by fixed random odd coefficients and summed modulo 2**64. The two sums of a row
are mixed with its number and the seed by a non-linear finaliser, and added up. Why two readings: modulo 2**64
the top bit of a word only sees the parity of its coefficient, so one reading would miss swapped words that
differ in the sign of their upper half; every 32-bit half is the lower half of one of the two readings. The
seed holds version, bucket and length, so a bucket replayed from another version does not pass.

It finds corruption and mistakes of ours; it is no defence against somebody who forges.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

ROW_WORDS = 32768
_CHUNK_ROWS = 4  # 1 MiB at a time: the second reading finds the data in cache, and temporaries stay small
_MASK = (1 << 64) - 1
_MIX_A = 0x9E3779B97F4A7C15
_MIX_B = 0xBF58476D1CE4E5B9
_MIX_C = 0x94D049BB133111EB


def digest(payload: torch.Tensor, *, version: int, bucket: int) -> torch.Tensor:
    """Digest of a contiguous uint8 payload whose size is a multiple of 8.

    Returns:
        int64 tensor of shape [1] on the payload's device; nothing is copied to the host.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() % 8 or not payload.is_contiguous():
        raise ValueError("digest wants a contiguous 1-D uint8 tensor whose size is a multiple of 8")
    seed = seed_of(version, bucket, payload.numel())
    words = payload.numel() // 8
    if words == 0:
        return torch.tensor([_signed(seed)], dtype=torch.int64, device=payload.device)
    rows = -(-words // ROW_WORDS)
    low = torch.empty(rows, dtype=torch.int64, device=payload.device)
    high = torch.zeros(rows, dtype=torch.int64, device=payload.device)
    _row_sums(payload, low, high)
    number = torch.arange(1, rows + 1, dtype=torch.int64, device=payload.device)
    mixed = _mix(low + number * _signed(_MIX_A) + _signed(seed))
    mixed = _mix(mixed ^ (high + number * _signed(_MIX_C)))
    return _mix(mixed.sum().reshape(1) + _signed(seed))


def seed_of(version: int, bucket: int, nbytes: int) -> int:
    """Unsigned 64-bit seed of one bucket of one version."""
    state = 0x6D656761726C0001
    for value in (version, bucket, nbytes):
        state = _mix_int((state ^ (value & _MASK)) + _MIX_A & _MASK)
    return state


def _row_sums(payload: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """low[r], high[r] = coefficient sums of row r of the two readings."""
    for_low, for_high = _coefficients(payload.device)
    row_bytes = ROW_WORDS * 8
    total = payload.numel()
    for start in range(0, total, row_bytes * _CHUNK_ROWS):
        stop = min(start + row_bytes * _CHUNK_ROWS, total)
        whole = start + (stop - start) // row_bytes * row_bytes
        for begin, end, width in ((start, whole, ROW_WORDS), (whole, stop, (stop - whole) // 8)):
            if begin == end:
                continue
            rows = slice(begin // row_bytes, begin // row_bytes + (end - begin) // (width * 8))
            low[rows] = _matvec(payload[begin:end].view(torch.int64).view(-1, width), for_low[:width])
            high[rows] = _shifted_sums(payload, begin, end, width, for_high)


def _shifted_sums(payload: torch.Tensor, begin: int, end: int, width: int, coefficients: torch.Tensor) -> torch.Tensor:
    """The same rows, read four bytes later; zeros stand for what lies behind the payload's last word."""
    if end == payload.numel():
        words = torch.cat([payload[begin + 4 :], payload.new_zeros(4)]).view(torch.int64)
    elif payload.device.type == "cpu":  # an unaligned view costs nothing here and is impossible elsewhere
        words = torch.from_numpy(payload.numpy()[begin + 4 : end + 4].view(np.int64))
    else:
        words = payload[begin + 4 : end + 4].clone().view(torch.int64)
    return _matvec(words.view(-1, width), coefficients[:width])


def _matvec(rows: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """[R, W] x [W] -> [R], int64 modulo 2**64. CPU has an integer matrix-vector product, CUDA has not."""
    if rows.device.type == "cpu":
        return torch.mv(rows, coefficients)
    return (rows * coefficients).sum(1)


@functools.lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of ROW_WORDS odd pseudo-random int64, the same on every device and version of torch."""
    number = torch.arange(1, 2 * ROW_WORDS + 1, dtype=torch.int64, device=device)
    values = _mix(number * _signed(_MIX_A)) | 1
    return values[:ROW_WORDS].clone(), values[ROW_WORDS:].clone()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, elementwise on int64 (a bijection)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_B)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_C)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's own on int64 extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * _MIX_B & _MASK
    x = (x ^ (x >> 27)) * _MIX_C & _MASK
    return x ^ (x >> 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
