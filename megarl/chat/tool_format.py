"""Finds the format of tool calls in a chat template by letting it write one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megarl.chat.dialogue import TURN, DialogueError
from megarl.chat.named_calls import learned_by_name
from megarl.chat.tool_calls import HERMES, BareFormat, TaggedFormat, ToolFormat, json_values
from megarl.chat.xml_calls import learned

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FormatName = Literal["hermes", "template"]
_NAME, _ARGUMENTS = "megarl_probe", {"megarl_key": "megarl_value"}
_ID = "call00000"
_SECOND = ("megarl_number", "271828")  # not a string: a template may write it in another form
_ADVICE = (
    "so it is unknown how the model writes one; set agent.tool_format: hermes if the model was trained with that format"
)


class NoCallsWritten(DialogueError):  # noqa: N818
    """The chat template writes no tool calls at all."""


def tool_format(
    name: FormatName, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> ToolFormat:
    """Return the format `name`; `template`: the format of the tokenizer's chat template.

    Raises NoCallsWritten if the template writes no calls. Raises DialogueError if it refuses one, or writes it in
    another form than JSON, name and JSON, or tags.
    """
    return HERMES if name == "hermes" else _of_template(tokenizer, dict(template_kwargs or {}))


def _of_template(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> ToolFormat:
    refusal: DialogueError | None = None
    silent = False
    # Some templates write calls only without content, or expect arguments as text. The first variant that shows the
    # call decides: the template may write others in a way that no model has seen.
    for content, arguments in itertools.product(("", None), (_ARGUMENTS, json.dumps(_ARGUMENTS))):
        probe = _Probe(tokenizer, kwargs, content)
        try:
            written = probe.written(arguments)
        except DialogueError as error:
            refusal = refusal or error
            continue
        if any(part in written for part in (_NAME, *_ARGUMENTS, *_ARGUMENTS.values())):
            found = _of_json(written) or _of_name(probe, written, arguments) or _of_tags(probe)
            if found is None:
                raise DialogueError(f"the chat template writes a tool call in an unknown form, {_ADVICE}")
            return found
        silent = True
    if refusal is not None and not silent:
        raise refusal
    raise NoCallsWritten(f"the chat template writes no tool calls, {_ADVICE}")


def _of_json(written: str) -> ToolFormat | None:
    found = _find(written)
    if found is None:
        return None
    first, last, name_key, arguments_key = found
    opening, closing = written[:first].strip(), written[last:].strip()
    if not opening:
        return BareFormat(name_key=name_key, arguments_key=arguments_key)
    return TaggedFormat(opening, closing, name_key, arguments_key)


def _of_name(probe: _Probe, written: str, arguments: object) -> ToolFormat | None:
    try:
        two = probe.written(arguments, calls=2)
    except DialogueError:  # some templates write only one call per turn
        two = ""
    return learned_by_name(written, two, _NAME, _ARGUMENTS, _ID)


def _of_tags(probe: _Probe) -> ToolFormat | None:
    key, number = _SECOND
    try:
        written = probe.written({**_ARGUMENTS, key: int(number)})
    except DialogueError:
        return None
    [first] = _ARGUMENTS.items()
    return learned(written, _NAME, first, _SECOND)


@dataclass(frozen=True)
class _Probe:
    """Lets a chat template write a turn that calls the probe; `content`: of the message."""

    tokenizer: PreTrainedTokenizerBase
    kwargs: dict[str, Any]
    content: str | None

    def written(self, arguments: object, *, calls: int = 1) -> str:
        """Return the template's text of `calls` calls. Raises DialogueError if it refuses them."""
        call = {"type": "function", "id": _ID, "function": {"name": _NAME, "arguments": arguments}}
        plain = self._render({"role": "assistant", "content": TURN})
        called = self._render({"role": "assistant", "content": self.content, "tool_calls": [call] * calls})
        before, _, end = plain.partition(TURN)
        start = next((at for at, (a, b) in enumerate(zip(before, called, strict=False)) if a != b), len(before))
        return called[start:].removesuffix(end)

    def _render(self, turn: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}, turn], tokenize=False, **self.kwargs
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise DialogueError(
                f"the chat template refuses a tool call: {error}; set agent.tool_format: hermes if the model was "
                "trained with that format"
            ) from error
        return text


def _find(written: str) -> tuple[int, int, str, str] | None:
    """Return where the probe's JSON begins and ends, and the keys of its name and arguments."""
    for start, end, value in json_values(written):
        one = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(one, dict):
            continue
        name = next((key for key, each in one.items() if each == _NAME), None)
        arguments = next((key for key, each in one.items() if each in (_ARGUMENTS, json.dumps(_ARGUMENTS))), None)
        if name is not None and arguments is not None:
            return start, end, name, arguments
    return None
