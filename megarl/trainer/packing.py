"""Assigns sequences to DP ranks and micro-batches: pure functions of lengths, with equal results on every rank.

A micro-batch is a list of sequences laid end to end (THD). Only context parallelism pads them, to chunks of equal
length. Pipeline schedules are collective, so every DP rank runs the same number of micro-batches; a rank with too few
sequences gets empty ones.
"""

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Nested: TypeAlias = "Sequence[Nested] | int"
_Loads: TypeAlias = "Sequence[tuple[int, ...]]"  # per sequence: tokens, and patches if they are bounded


def assign_to_ranks(lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Split sequences over `dp_size` replicas so that their token sums are close.

    Longest first, each sequence goes to the replica with the fewest tokens so far (then the fewest sequences, then the
    lowest rank). So the largest sum exceeds the smallest by at most the longest sequence.

    Returns one ascending list of indices into `lengths` per replica, which may be empty. Raises ValueError for a length
    below 1.
    """
    _check_lengths(lengths)
    return [sorted(part) for part in _balanced(lengths, range(len(lengths)), dp_size)]


def chunk_count(context: int) -> int:
    """Return how many chunks of equal length `context` context-parallel ranks cut a sequence into: two per rank."""
    return 2 * context if context > 1 else 1


def padded(length: int, context: int) -> int:
    """Return the tokens that a sequence takes in a micro-batch, padding included."""
    chunks = chunk_count(context)
    return -(-length // chunks) * chunks


@dataclass(frozen=True)
class Patches:
    """Vision patches of each rank's sequences, in the order of the lengths, and the most per micro-batch."""

    per_rank: Sequence[Sequence[int]]
    most: int


def plan_micro_batches(
    lengths_per_rank: Sequence[Sequence[int]],
    max_tokens: int,
    multiple_of: int = 1,
    minimum: int = 1,
    patches: Patches | None = None,
) -> list[list[list[int]]]:
    """Pack each rank's sequences into micro-batches of at most `max_tokens` tokens, the same number on all ranks.

    The number is the largest that any rank needs, at least `minimum`, rounded up to a multiple of `multiple_of`
    (interleaved pipelines need a multiple of PP and at least PP). A rank balances its tokens over its micro-batches.
    `patches`: also bounds the vision patches of each micro-batch.

    Returns:
        `[rank][micro-batch]` -> indices into `lengths_per_rank[rank]`, longest sequence first, so that attention can
        batch equal lengths; `[]` is an empty micro-batch.

    Raises:
        ValueError: a sequence is longer than `max_tokens` or has too many patches, or a length is below 1.
    """
    limits = (max_tokens,) if patches is None else (max_tokens, patches.most)
    packed: list[list[list[int]]] = []
    loads: list[_Loads] = []
    for rank, lengths in enumerate(lengths_per_rank):
        _check_lengths(lengths)
        longest = max(lengths, default=0)
        if longest > max_tokens:
            raise ValueError(
                f"a sequence of {longest} tokens does not fit in trainer.micro_batch_tokens={max_tokens}; "
                f"raise it to at least {longest}, or lower sampling.max_tokens or data.max_prompt_tokens"
            )
        load: _Loads = [(length,) for length in lengths]
        if patches is not None:
            load = list(zip(lengths, patches.per_rank[rank], strict=True))
            if (most := max(patches.per_rank[rank], default=0)) > patches.most:
                raise ValueError(
                    f"a sequence with {most} vision patches does not fit in trainer.micro_batch_patches="
                    f"{patches.most}; raise it to at least {most}, or lower model.vision.max_pixels"
                )
        loads.append(load)
        packed.append(_first_fit_decreasing(lengths, load, limits))
    number = max([minimum, *(len(bins) for bins in packed)])
    number = -(-number // multiple_of) * multiple_of
    return [
        _spread(lengths, bins, number, load, limits)
        for lengths, bins, load in zip(lengths_per_rank, packed, loads, strict=True)
    ]


def partition_hash(plan: Nested) -> str:
    """Return the hash of a plan, for ranks to compare the plans that they computed independently."""
    return hashlib.sha256(json.dumps(plan, separators=(",", ":")).encode()).hexdigest()[:16]


def _check_lengths(lengths: Sequence[int]) -> None:
    if any(length < 1 for length in lengths):
        raise ValueError("every sequence needs at least one token")


def _longest_first(lengths: Sequence[int], indices: Sequence[int] | range) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def _balanced(lengths: Sequence[int], indices: Sequence[int] | range, parts: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for index in _longest_first(lengths, indices):
        tokens, count, part = heapq.heappop(heap)
        result[part].append(index)
        heapq.heappush(heap, (tokens + lengths[index], count + 1, part))
    return result


def _first_fit_decreasing(lengths: Sequence[int], loads: _Loads, limits: tuple[int, ...]) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[tuple[int, ...]] = []
    for index in _longest_first(lengths, range(len(lengths))):
        fitting = next((number for number, free in enumerate(room) if _fits(loads[index], free)), None)
        if fitting is None:
            bins.append([])
            room.append(limits)
            fitting = len(bins) - 1
        bins[fitting].append(index)
        room[fitting] = tuple(free - own for free, own in zip(room[fitting], loads[index], strict=True))
    return bins


def _spread(
    lengths: Sequence[int], bins: list[list[int]], number: int, loads: _Loads, limits: tuple[int, ...]
) -> list[list[int]]:
    balanced = _balanced(lengths, range(len(lengths)), number)
    totals = (tuple(map(sum, zip(*(loads[index] for index in part), strict=True))) for part in balanced if part)
    if not all(_fits(total, limits) for total in totals):
        # Balancing ignores the limits; first-fit packing respects them.
        balanced = bins + [[] for _ in range(number - len(bins))]
    return [_longest_first(lengths, part) for part in balanced]


def _fits(load: tuple[int, ...], room: tuple[int, ...]) -> bool:
    return all(own <= free for own, free in zip(load, room, strict=True))
