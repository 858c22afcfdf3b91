"""A custom tool that counts the digits in a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megarl import ToolAnswer


class Digits:
    """Implements `megarl.Tool`. One object in its own process answers the calls of all samples."""

    name = "digits"
    description = "Count the digits in a text."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    idempotent = True

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Return the number of digits; a mistake by the model also gets an answer."""
        text = arguments.get("text")
        if not isinstance(text, str):
            return ToolAnswer("digits needs the argument `text`, a string", error=True)
        return ToolAnswer(f"{sum(letter.isdigit() for letter in text)} digits.")

    async def close(self) -> None:
        """Do nothing: there are no processes."""
