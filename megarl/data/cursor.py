"""Which prompt comes next: a seeded order, new each epoch, whose whole state is one number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Cursor:
    """Draws indices 0..n-1 forever, each once per epoch.

    The order of an epoch is derived from (seed, epoch), never stored; draw k can be asked for directly, so a
    group that is redrawn after a resume gets the problem it had. It sorts hashes instead of calling a
    library's shuffle, so that it stays the same under other versions of Python and numpy.
    """

    def __init__(self, n: int, seed: int, shuffle: bool = True) -> None:
        if n < 1:
            raise ValueError("a cursor needs at least one prompt")
        self.n = n
        self.seed = seed
        self.shuffle = shuffle
        self.drawn = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def next(self) -> tuple[int, int]:
        """(epoch, index) of the next draw."""
        result = self.at(self.drawn)
        self.drawn += 1
        return result

    def at(self, draw: int) -> tuple[int, int]:
        """(epoch, index) of draw number `draw`, counted from 0; does not move the cursor."""
        epoch, position = divmod(draw, self.n)
        if not self.shuffle:
            return epoch, position
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.n, self.seed, epoch))
        return epoch, int(self._order[1][position])

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to another data set size, seed or order."""
        for key, now in (("n", self.n), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != now:
                raise ValueError(
                    f"the saved prompt cursor has {key} = {state[key]}, but this run has {now}: resume with the "
                    "data, run.seed and data.shuffle of the saved run"
                )
        self.drawn = int(state["drawn"])


def epoch_order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Permutation of 0..n-1, int64, a pure function of its arguments."""
    with np.errstate(over="ignore"):
        stream = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.uint64(epoch) * _GOLDEN)
        keys = _mix(stream + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)
    return np.argsort(keys, kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea, Flood 2014), a bijection on 64 bits."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
