"""The protocol of a tool: a named function with a schema, which an agent loop calls and whose answer is text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# Bounds on the answers of tools. Pure.

MAX_CHARACTERS = 8_000


def bounded(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text of at most `limit` characters; of a longer one, beginning and end with a note between them.

    Raises ValueError if `limit` leaves no room for the note.
    """
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters or more left out ...]\n"
    left = limit - len(note)
    if left < 2:
        raise ValueError(f"an answer of {limit} characters is too short for the note that it was cut")
    head = (left + 1) // 2
    return text[:head] + note + text[len(text) - (left - head) :]


@dataclass(frozen=True)
class ToolAnswer:
    """The outcome of a call of a tool. `error`: the call failed, and `text` says why, for the model."""

    text: str
    error: bool = False


class Tool(Protocol):
    """A tool. One object serves all samples at once.

    Attributes:
        name: the name by which the model calls it.
        description: what it does, for the model.
        parameters: the JSON schema of its arguments: an object schema.
        idempotent: whether a call may be repeated after an interruption. If not, a call that was begun and whose answer
            is not known is answered with an error instead.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    idempotent: bool

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Run the tool; the answer to arguments that it cannot use, or to a failure, is an error.

        Raises nothing because of what the model wrote. `timeout_s`: the call has ended after about that time.
        """
        ...

    async def close(self) -> None:
        """End the processes and connections of the tool."""
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the tool's description as chat templates and OpenAI's API take it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
