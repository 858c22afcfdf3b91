"""The format of tool calls that a chat template writes, found by letting it write one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megarl.data.dialogue import TURN, DialogueError
from megarl.data.tool_calls import HERMES, BareFormat, TaggedFormat, ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FormatName = Literal["hermes", "template"]
_NAME, _ARGUMENTS = "megarl_probe", {"megarl_key": "megarl_value"}


def tool_format(
    name: FormatName, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> ToolFormat:
    """Return the format `name`: `template` is the one that the tokenizer's chat template writes.

    Raises DialogueError if the template writes no calls, or none that consists of JSON.
    """
    return HERMES if name == "hermes" else _of_template(tokenizer, dict(template_kwargs or {}))


def _of_template(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> ToolFormat:
    call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    plain = _render(tokenizer, {"role": "assistant", "content": TURN}, kwargs)
    called = _render(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]}, kwargs)
    before, _, end = plain.partition(TURN)
    start = next((at for at, (a, b) in enumerate(zip(before, called, strict=False)) if a != b), len(before))
    written = called[start:].removesuffix(end)
    found = _find(written)
    if found is None:
        raise DialogueError(
            "the chat template does not write a tool call as JSON, so it is unknown how the model writes one; set "
            "agent.tool_format: hermes if the model was trained with that format"
        )
    first, last, name_key, arguments_key = found
    opening, closing = written[:first].strip(), written[last:].strip()
    if not opening:
        return BareFormat(name_key=name_key, arguments_key=arguments_key)
    return TaggedFormat(opening, closing, name_key, arguments_key)


def _find(written: str) -> tuple[int, int, str, str] | None:
    """Return where the probe's JSON begins and ends, and the keys of its name and its arguments."""
    for start, letter in enumerate(written):
        if letter not in "{[":
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            continue
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(one, dict):
            continue
        name = next((key for key, each in one.items() if each == _NAME), None)
        arguments = next((key for key, each in one.items() if each in (_ARGUMENTS, json.dumps(_ARGUMENTS))), None)
        if name is not None and arguments is not None:
            return start, end, name, arguments
    return None


def _render(tokenizer: PreTrainedTokenizerBase, turn: Mapping[str, Any], kwargs: dict[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}, dict(turn)], tokenize=False, **kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DialogueError(
            f"the chat template refuses a tool call: {error}; set agent.tool_format: hermes if the model was trained "
            "with that format"
        ) from error
    return text
