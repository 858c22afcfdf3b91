"""The protocol of a tool: a named function with a schema, which an agent loop calls; text and images are its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.common.values import data_url_content
from megarl.queue.images import IMAGE_MARK

# Bounds on the answers of tools. Pure.

MAX_CHARACTERS = 8_000
MAX_IMAGE_BYTES = 24 << 20  # of the images of an answer together


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
    """The outcome of a call of a tool. `error`: the call failed, and `text` says why, for the model.

    `images`: the files of images. A mark `<image>` in the text stands for each; else they come before the text.
    """

    text: str
    error: bool = False
    images: tuple[bytes, ...] = ()


def answer_of(value: object) -> ToolAnswer:
    """Return what a function has returned as an answer: text, chat parts with images, or any other value as JSON.

    An image is `{"type": "image", "image": bytes}` or `{"type": "image_url", "image_url": {"url": a data URL}}`. Raises
    ValueError, KeyError or TypeError for parts of another form, and for images of more than `MAX_IMAGE_BYTES`.
    """
    if not _has_images(value):
        return ToolAnswer(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    texts: list[str] = []
    images: list[bytes] = []
    for part in value:  # type: ignore[attr-defined]
        texts.append(part["text"] if part["type"] == "text" else IMAGE_MARK)
        if part["type"] == "image":
            images.append(bytes(memoryview(part["image"])))
        elif part["type"] != "text":
            images.append(data_url_content(part["image_url"]["url"], MAX_IMAGE_BYTES))
    return ToolAnswer("".join(texts), images=tuple(images))


def _has_images(value: object) -> bool:
    parts = value if isinstance(value, list) else []
    return any(isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts)


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
