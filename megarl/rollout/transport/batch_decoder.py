"""Decoding of responses: those that end in one turn of the event loop are decoded together, in another thread.

Decoding takes longer than all else that is done for a response, and the library lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megarl.common.errors import RolloutError
from megarl.rollout.transport.gather import Turn


class BatchDecoder:
    """Collects token ids for the function `decode_all`, which returns their texts in order."""

    def __init__(self, decode_all: Callable[[Sequence[Sequence[int]]], list[str]], timeout_s: float) -> None:
        """`timeout_s`: the longest time that a text may take, `timeouts.rpc_s` of the config."""
        self._decode_all, self._timeout_s = decode_all, timeout_s
        self._turn: Turn[Sequence[int], str] | None = None

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises what `decode_all` raises for the turn's token ids, and RolloutError if no text comes in time.
        """
        if self._turn is None or not self._turn.open:
            self._turn = Turn(self._decode)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._turn.join(ids)
        except TimeoutError as error:
            if not limit.expired():  # `decode_all` has raised it
                raise
            raise RolloutError(
                f"a response of {len(ids)} tokens waited {self._timeout_s:g} s (timeouts.rpc_s) for a thread of the "
                "controller to decode it; give that process more of a core, or raise the bound"
            ) from error

    async def _decode(self, sequences: list[Sequence[int]]) -> list[str]:
        return await asyncio.get_running_loop().run_in_executor(None, self._decode_all, sequences)
