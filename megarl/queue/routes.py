"""The experts that an engine chose for the tokens of a response, for the trainer to replay.

Shapes: T tokens, L MoE layers of the model, K experts per token.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of consecutive tokens: `experts_TLK`, uint8, or uint16 with more than 256 experts.

    A response's routes start with its prompt and lack its last token, which the engine has not read.
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
        """Return the routes of tokens [start, end)."""
        return Routes(self.experts_TLK[start:end])

    @property
    def form(self) -> list[int]:
        """Shape and item size in bytes, as `read` needs them."""
        return [*self.experts_TLK.shape, self.experts_TLK.itemsize]

    def tobytes(self) -> bytes:
        """Return the numbers in native byte order."""
        return self.experts_TLK.tobytes()

    @classmethod
    def read(cls, form: list[int], content: bytes | memoryview) -> Routes:
        """Return the routes with this `form`. Raises ValueError if `content` does not fit it."""
        *shape, itemsize = form
        return cls(np.frombuffer(content, dtype=f"u{itemsize}").reshape(shape))


def joined(*parts: Routes | None) -> Routes | None:
    """Return the concatenated parts; None if there are none."""
    some = [part.experts_TLK for part in parts if part is not None]
    return Routes(np.concatenate(some) if len(some) > 1 else some[0]) if some else None


@dataclass(frozen=True)
class RoutesSpec:
    """The routes that a model needs per token: `topk` different ones of `experts` in each of `layers`."""

    layers: int
    topk: int
    experts: int

    def problem(self, routes: Routes | None, tokens: int) -> str:
        """Return why the experts of `tokens` tokens cannot be replayed; "" if they can.

        Without this check Megatron-Core would silently route to fewer experts, or to none.
        """
        if routes is None:
            return "it has no experts to replay"
        wanted = (tokens, self.layers, self.topk)
        if routes.experts_TLK.shape != wanted:
            return f"its experts have the shape {list(routes.experts_TLK.shape)}, not {list(wanted)}"
        # Comparing columns of experts takes a tenth of the time of sorting each token's.
        rows = np.ascontiguousarray(routes.experts_TLK.reshape(-1, self.topk).T)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.experts:
            return f"a token has expert {rows.max() if rows.min() >= 0 else rows.min()} of {self.experts}"
        if any((one == other).any() for one, other in itertools.combinations(rows, 2)):
            return "a token has an expert twice"
        return ""
