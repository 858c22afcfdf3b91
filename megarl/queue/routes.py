"""The experts that an engine has chosen for the tokens of a response, as a trainer replays them.

Shapes: T tokens, L layers with experts of the model, K experts of a token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of consecutive tokens: `experts_TLK`, uint8; uint16 of a model with more than 256 experts.

    Those of a response begin with its prompt; the last token of all has none, because the engine has not read it.
    """

    experts_TLK: np.ndarray

    def __len__(self) -> int:
        return len(self.experts_TLK)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routes) and (
            self.experts_TLK.dtype == other.experts_TLK.dtype and np.array_equal(self.experts_TLK, other.experts_TLK)
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, start: int, end: int | None = None) -> Routes:
        """Return those of the tokens from `start` to `end`."""
        return Routes(self.experts_TLK[start:end])

    @property
    def form(self) -> list[int]:
        """Its shape and the bytes of a number, with which `read` makes it from its bytes."""
        return [*self.experts_TLK.shape, self.experts_TLK.itemsize]

    def tobytes(self) -> bytes:
        """Return its numbers in the machine's byte order."""
        return self.experts_TLK.tobytes()

    @classmethod
    def read(cls, form: list[int], content: bytes | memoryview) -> Routes:
        """Return those that have this `form`. Raises ValueError for other bytes."""
        *shape, itemsize = form
        return cls(np.frombuffer(content, dtype=f"u{itemsize}").reshape(shape))


def joined(*parts: Routes | None) -> Routes | None:
    """Return the parts one after the other; None if there are none."""
    some = [part.experts_TLK for part in parts if part is not None]
    return Routes(np.concatenate(some) if len(some) > 1 else some[0]) if some else None


@dataclass(frozen=True)
class RoutesSpec:
    """What the experts of a model's token are: `topk` different ones of `experts` at each of `layers`."""

    layers: int
    topk: int
    experts: int

    def problem(self, routes: Routes | None, tokens: int) -> str:
        """Return why the experts of `tokens` tokens cannot be replayed; "" if they can.

        The trainer must not see them: Megatron-Core would route to fewer experts, or to none, without an error.
        """
        if routes is None:
            return "it has no experts to replay"
        wanted = (tokens, self.layers, self.topk)
        if routes.experts_TLK.shape != wanted:
            return f"its experts have the shape {list(routes.experts_TLK.shape)}, not {list(wanted)}"
        # Rows of one expert each: a comparison of two takes a tenth of the time that sorting each token's would.
        rows = np.ascontiguousarray(routes.experts_TLK.reshape(-1, self.topk).T)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.experts:
            return f"a token has expert {rows.max() if rows.min() >= 0 else rows.min()} of {self.experts}"
        if any((one == other).any() for one, other in itertools.combinations(rows, 2)):
            return "a token has an expert twice"
        return ""
