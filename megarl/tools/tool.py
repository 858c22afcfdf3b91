"""The protocol of a tool: a named function with a schema, called by an agent loop; it answers with text and images."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.common.values import data_url_content
from megarl.queue.images import IMAGE_MARK

MAX_CHARACTERS = 8_000
MAX_IMAGE_BYTES = 24 << 20  # of all images of an answer


def bounded(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text of at most `limit` characters: a longer one becomes its beginning, a note and its end.

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
    """The outcome of a tool call. `error`: the call failed, and `text` tells the model why.

    `images`: image files. Each has a mark `<image>` in the text; otherwise they come before the text. Raises ValueError
    if they have more than `MAX_IMAGE_BYTES`.
    """

    text: str
    error: bool = False
    images: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if sum(map(len, self.images)) > MAX_IMAGE_BYTES:
            raise ValueError(f"the images of the answer have more than {MAX_IMAGE_BYTES:,} bytes")


def answer_of(value: object) -> ToolAnswer:
    """Return a function's return value as an answer: text, chat parts with images, or any other value as JSON.

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
        idempotent: whether a call may be repeated after an interruption. If not, an interrupted call is answered with
            an error.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    idempotent: bool

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float) -> ToolAnswer:
        """Run the tool; bad arguments and failures are answered with an error.

        It must not raise because of the model's input. `timeout_s`: the call ends after about this time.
        """
        ...

    async def close(self) -> None:
        """End the processes and connections of the tool."""
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the tool's description in the form for chat templates and OpenAI's API."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
