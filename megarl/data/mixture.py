"""Draws prompt groups from several sets: the set of each group, and the number of its draw from that set. Pure.

The sets are interleaved evenly: after any number of groups at constant weights, each of K sets deviates from its share
by fewer than K draws. Both are computed from (seed, group id) in exact arithmetic, so a group that is generated again
gets the same prompt on any machine. Weights change from a group id on; the only state is the list of changes that
unsettled groups need.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The order of the prompts: seeded, reshuffled each epoch, and computed from the number of a draw.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Cursor:
    """An endless sequence of the indices 0..n-1, each once per epoch.

    An epoch's order is computed from (seed, epoch) and never stored. Draw k can be computed directly, so a group that
    is generated again after a resume gets the same problem. The order is an argsort of hashes, not a library's shuffle,
    so it does not depend on the versions of Python and numpy.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        if n < 1:
            raise ValueError("a cursor needs at least one prompt")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def at(self, draw: int) -> tuple[int, int]:
        """Return (epoch, index) of draw number `draw` (from 0)."""
        epoch, position = divmod(draw, self.n)
        if not self.shuffle:
            return epoch, position
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.n, self.seed, epoch))
        return epoch, int(self._order[1][position])

    def state_dict(self) -> dict[str, Any]:
        """Return the values that define the order, as JSON content.

        The caller keeps the number of the next draw; the format still contains `drawn`.
        """
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "drawn": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a saved state. Raises ValueError if its number of prompts, seed or shuffle flag differs."""
        for key, own in (("n", self.n), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != own:
                raise ValueError(
                    f"the saved prompt cursor has {key} = {state[key]}, but this run has {own}: resume with the "
                    "data, run.seed and data.shuffle of the saved run"
                )


def epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of 0..n-1, int64 [n], that depends only on the arguments."""
    with np.errstate(over="ignore"):
        stream = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch) * _GOLDEN)
        keys = _mix(stream + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)
    return np.argsort(keys, kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers with splitmix64's finalizer, a bijection (Steele, Lea, Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class _Span:
    """The groups from `start` up to the next span.

    `drawn`: each set's draws before `start`; `splits`: for each set, its share of the draws that earlier sets leave.
    """

    start: int
    weights: tuple[float, ...]
    drawn: tuple[int, ...]
    splits: tuple[_Split, ...]


class Mixture:
    """The sets of a run by name, with weights that may change from a group id on.

    Raises ValueError for weights that are negative, not finite or all zero.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        self.names = tuple(weights)
        self.seed = seed
        self._spans = [self._span(0, self._checked(weights), [0] * len(self.names))]

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the groups to come, by name."""
        return dict(zip(self.names, self._spans[-1].weights, strict=True))

    def at(self, group: int) -> tuple[int, int]:
        """Return (index of the set, number of the draw from it, from 0) of a group id."""
        span = self._spans[bisect.bisect_right(self._spans, group, key=lambda each: each.start) - 1]
        position = group - span.start
        for index, split in enumerate(span.splits):
            before = split.taken(position)
            if split.taken(position + 1) > before:
                return index, span.drawn[index] + before
            position -= before
        raise AssertionError("the last set that has a weight takes every draw that reaches it")

    def reweight(self, start: int, weights: Mapping[str, float]) -> None:
        """Use other weights from group `start` on. Raises ValueError if that is before the last change."""
        checked, last = self._checked(weights), self._spans[-1]
        if checked == last.weights:
            return
        if start < last.start:
            raise ValueError(f"the weights of group {start} cannot change: those from group {last.start} on are set")
        drawn = list(last.drawn)
        position = start - last.start
        for index, split in enumerate(last.splits):
            drawn[index] += split.taken(position)
            position -= split.taken(position)
        if start == last.start:
            self._spans.pop()
        self._spans.append(self._span(start, checked, drawn))

    def follow(self, start: int, schedule: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Follow a schedule of (first group, weights) from the undrawn group `start` on.

        Drops earlier changes for later groups. Raises ValueError like `reweight`, and if the schedule has no weights
        for `start`.
        """
        del self._spans[1 + bisect.bisect_right(self._spans[1:], start, key=lambda each: each.start) :]
        present = [weights for group, weights in schedule if group <= start]
        if not present:
            raise ValueError(f"no weights are set for group {start}")
        self.reweight(start, present[-1])
        for group, weights in schedule:
            if group > start:
                self.reweight(group, weights)

    def forget(self, group: int) -> None:
        """Drop the changes that only groups before `group` need; these can then not be drawn again."""
        del self._spans[: bisect.bisect_right(self._spans, group, key=lambda each: each.start) - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return names, seed and the remembered changes of weights, as JSON content."""
        first = self._spans[0]
        return {
            "names": list(self.names),
            "seed": self.seed,
            "spans": [{"start": each.start, "weights": list(each.weights)} for each in self._spans],
            "drawn": list(first.drawn),  # before the first of them
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved list of changes. Raises ValueError if sets or seed differ."""
        for key, own in (("names", list(self.names)), ("seed", self.seed)):
            if state[key] != own:
                raise ValueError(
                    f"the saved run draws from data sets with {key} = {state[key]}, but this run has {own}: resume "
                    "with data.sets and run.seed of the saved run"
                )
        first, *others = state["spans"]
        drawn = state.get("drawn", [0] * len(self.names))  # earlier releases kept every change
        self._spans = [self._span(first["start"], tuple(first["weights"]), drawn)]
        for each in others:
            self.reweight(each["start"], dict(zip(self.names, each["weights"], strict=True)))

    def _checked(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        if set(weights) != set(self.names):
            raise ValueError(f"weights of {sorted(weights)}, but the sets are {sorted(self.names)}")
        values = tuple(float(weights[name]) for name in self.names)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise ValueError(f"weights must be at least 0 and not all 0: {dict(weights)}")
        return values

    def _span(self, start: int, weights: tuple[float, ...], drawn: Sequence[int]) -> _Span:
        exact = [Fraction(str(weight)) for weight in weights]
        splits = [
            _Split.of(exact[index], sum(exact[index:], Fraction(0)), f"{self.seed}/{name}")
            for index, name in enumerate(self.names)
        ]
        return _Span(start, weights, tuple(drawn), tuple(splits))


@dataclass(frozen=True)
class _Split:
    """Takes `numerator` of every `denominator` draws, evenly; `phase` shifts which ones."""

    numerator: int
    denominator: int
    phase: int

    @classmethod
    def of(cls, weight: Fraction, rest: Fraction, place: str) -> _Split:
        share = weight / rest if rest else Fraction(0)
        return cls(share.numerator, share.denominator, stable_hash(place) % share.denominator)

    def taken(self, draws: int) -> int:
        """Return how many of the first `draws` draws are taken: their share, rounded up or down."""
        return (draws * self.numerator + self.phase) // self.denominator


def stable_hash(text: str) -> int:
    """Return a 63-bit number that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
