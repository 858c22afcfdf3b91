"""Keys of the beginnings of a conversation, by which a recorded turn of the model is found again. Pure.

A key stands for all messages up to one, and for what the prompt depends on besides them. Clients send the model's turns
back in slightly other forms than they got them: nulls are left out, arguments of tool calls are written anew, white
space around a text is lost. Such forms have the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

ChatMessage = Mapping[str, Any]

# Fields of a message that the prompt depends on. Others, such as `refusal` and `annotations`, come from clients.
_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def root_key(*parts: object) -> str:
    """Return the key of a conversation without messages. `parts`: what its prompt depends on besides them, as JSON."""
    return _digest("", parts)


def extended(key: str, message: ChatMessage) -> str:
    """Return the key of the messages of `key` followed by `message`."""
    return _digest(key, _canonical(message))


def keys_of(root: str, messages: Sequence[ChatMessage]) -> list[str]:
    """Return the keys of all beginnings: of no message, of the first one, of the first two, and so on."""
    keys = [root]
    for message in messages:
        keys.append(extended(keys[-1], message))
    return keys


def _canonical(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {name: message[name] for name in _FIELDS if message.get(name)}
    if isinstance(found.get("content"), str):
        found["content"] = found["content"].strip()
    if not found.get("content"):
        found.pop("content", None)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else as the model wrote it
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _digest(before: str, value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{before}\n{text}".encode(), digest_size=16).hexdigest()
