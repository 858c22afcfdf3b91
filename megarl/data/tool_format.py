"""The format of tool calls that a chat template writes, found by letting it write one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from megarl.data.dialogue import TURN, DialogueError
from megarl.data.tool_calls import HERMES, BareFormat, TaggedFormat, ToolFormat
from megarl.data.xml_calls import learned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FormatName = Literal["hermes", "template"]
_NAME, _ARGUMENTS = "megarl_probe", {"megarl_key": "megarl_value"}
_SECOND = ("megarl_number", "271828")  # an argument that is no string, which a template might write in another form


def tool_format(
    name: FormatName, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> ToolFormat:
    """Return the format `name`: `template` is the one that the tokenizer's chat template writes.

    Raises DialogueError if the template writes no calls, or writes them neither as JSON nor as tags.
    """
    return HERMES if name == "hermes" else _of_template(tokenizer, dict(template_kwargs or {}))


def _of_template(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> ToolFormat:
    written = _written(tokenizer, _ARGUMENTS, kwargs)
    found = _find(written)
    if found is None:
        return _of_tags(tokenizer, kwargs)
    first, last, name_key, arguments_key = found
    opening, closing = written[:first].strip(), written[last:].strip()
    if not opening:
        return BareFormat(name_key=name_key, arguments_key=arguments_key)
    return TaggedFormat(opening, closing, name_key, arguments_key)


def _of_tags(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> ToolFormat:
    key, number = _SECOND
    written = _written(tokenizer, {**_ARGUMENTS, key: int(number)}, kwargs)
    [first] = _ARGUMENTS.items()
    found = learned(written, _NAME, first, _SECOND)
    if found is None:
        raise DialogueError(
            "the chat template writes a tool call neither as JSON nor as tags, so it is unknown how the model writes "
            "one; set agent.tool_format: hermes if the model was trained with that format"
        )
    return found


def _written(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], kwargs: dict[str, Any]) -> str:
    """Return what a template writes for a turn that calls the probe."""
    call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": arguments}}
    plain = _render(tokenizer, {"role": "assistant", "content": TURN}, kwargs)
    called = _render(tokenizer, {"role": "assistant", "content": "", "tool_calls": [call]}, kwargs)
    before, _, end = plain.partition(TURN)
    start = next((at for at, (a, b) in enumerate(zip(before, called, strict=False)) if a != b), len(before))
    return called[start:].removesuffix(end)


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
