"""Decoding of responses: those that end in one turn of the event loop are decoded together, in another thread.

Decoding takes longer than all else that is done for a response, and the library lets other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from megarl.common.errors import RolloutError

Waiting = list[tuple[Sequence[int], asyncio.Future[str]]]


class BatchDecoder:
    """Collects token ids for the function `decode_all`, which returns their texts in order."""

    def __init__(self, decode_all: Callable[[Sequence[Sequence[int]]], list[str]], timeout_s: float) -> None:
        """`timeout_s`: the longest time that a text may take, `timeouts.rpc_s` of the config."""
        self._decode_all, self._timeout_s = decode_all, timeout_s
        self._waiting: Waiting = []

    async def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids.

        Raises what `decode_all` raises for the turn's token ids, and RolloutError if no text comes in time.
        """
        loop = asyncio.get_running_loop()
        decoded: asyncio.Future[str] = loop.create_future()
        self._waiting.append((ids, decoded))
        if len(self._waiting) == 1:
            loop.call_soon(self._send)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await decoded
        except TimeoutError as error:
            if not limit.expired():  # `decode_all` has raised it
                raise
            raise RolloutError(
                f"a response of {len(ids)} tokens waited {self._timeout_s:g} s (timeouts.rpc_s) for a thread of the "
                "controller to decode it; give that process more of a core, or raise the bound"
            ) from error

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        sequences = [ids for ids, _ in waiting]
        try:
            texts = asyncio.get_running_loop().run_in_executor(None, self._decode_all, sequences)
        except Exception as error:  # no thread can be started, or the executor was shut down
            _fail(waiting, error)
            return
        texts.add_done_callback(partial(_settle, waiting))


def _fail(waiting: Waiting, error: Exception) -> None:
    """Give each of those that still wait the error because of which nothing was decoded."""
    for _, decoded in waiting:
        if not decoded.done():
            decoded.set_exception(error)


def _settle(waiting: Waiting, texts: asyncio.Future[list[str]]) -> None:
    """Give each of those that still wait its text, or the failure of all."""
    error = None if texts.cancelled() else texts.exception()
    for position, (_, decoded) in enumerate(waiting):
        if decoded.done():
            continue
        if texts.cancelled():
            decoded.cancel()
        elif error is not None:
            decoded.set_exception(error)
        else:
            decoded.set_result(texts.result()[position])
