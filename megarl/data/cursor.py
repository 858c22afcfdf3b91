"""The order of the prompts: seeded, reshuffled each epoch, and computed from the number of a draw."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
