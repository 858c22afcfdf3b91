"""The text of a response that is still being made: how much of it can be sent already. Pure.

Held back is what later tokens may change: the bytes of an unfinished character, the beginning of a stop string, and,
where the model may call tools, everything that may turn out to be part of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.chat.tool_calls import ToolFormat
from megarl.gateway.chat_route import ChatText, cut_at

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet


class TextStream:
    """Gives the content of one response piece by piece; the pieces together are the content of the whole turn."""

    def __init__(self, stops: Sequence[str], tools: ToolFormat | None) -> None:
        """`tools`: the format of calls; None if the model was shown no tools."""
        self._stops, self._tools = tuple(stops), tools
        self._sent = ""

    def piece(self, text: str) -> str:
        """Return what can be sent besides what was sent before. `text`: of all tokens so far."""
        sure, stopped = cut_at(text, self._stops)
        if not stopped:
            sure = sure.rstrip(_UNFINISHED)
            sure = sure[: len(sure) - self._may_stop(sure)]
        if self._tools is not None:
            sure = self._tools.certain_content(sure)
        return self._send(sure)

    def last_piece(self, turn: ChatText) -> str:
        """Return what is missing of the content of a response that has ended."""
        return self._send(turn.content)

    def _send(self, content: str) -> str:
        if not content.startswith(self._sent):
            return ""  # a decoder changed its mind about the last characters; the next piece may fit again
        piece, self._sent = content[len(self._sent) :], content
        return piece

    def _may_stop(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)
