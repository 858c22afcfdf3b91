"""Reads the tool calls in a turn of the model, in the format that the model was trained with. Pure.

A malformed call has an error for the model, which is the tool's answer to that call. Text inside a `<think>` block is
never read as a call.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_THINK, _THOUGHT = "<think>", "</think>"
MAX_DEPTH = 64
MAX_INTEGER = 2**63
_ARGUMENTS = ("arguments", "parameters")  # keys of a call's arguments
_QUOTED = 200  # characters of a malformed call that its error quotes


@dataclass(frozen=True)
class ToolCall:
    """A call to the tool `name`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """The text of a call that cannot be read; `error` tells the model why."""

    text: str
    error: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the model: the text outside its calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()


ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API describes them (`megarl.tools.tool.schema_of`)."""


class ToolFormat:
    """How a model writes its calls: one or several after the text `opening`."""

    opening: str

    def read(self, text: str, tools: ToolSchemas) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """Read the text after an opening; return its calls, the text after them, and whether that is another call."""
        raise NotImplementedError

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedTurn:
        """Read the text of a whole turn, which may contain special tokens but not the end of the turn.

        `tools`: the tools shown to the model, for formats without types of arguments.
        """
        thought, rest = split_thought(text, self.opening)
        content: list[str] = [thought]
        calls: list[ToolCall | MalformedCall] = []
        more = False
        while True:
            if not more:
                before, found, rest = rest.partition(self.opening)
                content.append(before)
                if not found:
                    return ParsedTurn("".join(content).strip(), tuple(calls))
            read, rest, more = self.read(rest, tools)
            calls += read

    def certain_content(self, text: str) -> str:
        """Return the part of an unfinished turn that is content whatever follows."""
        thought, rest = split_thought(text, self.opening)
        before, found, _ = rest.partition(self.opening)
        if not found:
            before = before[: len(before) - overlap(before, self.opening)]
        # Trailing white space is not content if a call follows.
        return (thought + before).strip()


@dataclass(frozen=True)
class TaggedFormat(ToolFormat):
    """Calls between an opening and a closing text, each one JSON object; Hermes and Qwen use `<tool_call>`.

    `name_key`, `arguments_key`: keys of the object. With an empty `closing`, a call ends with its object.
    """

    opening: str = "<tool_call>"
    closing: str = "</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"

    def read(self, text: str, tools: ToolSchemas) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """See `ToolFormat.read`."""
        end = _json_end(text)
        body, rest = text[:end], text[end:]
        # The closing text may also appear in a string of the call.
        if self.closing and rest.lstrip().startswith(self.closing):
            rest = rest.lstrip().removeprefix(self.closing)
        elif self.closing:
            body, found, rest = text.partition(self.closing)
            if not found:
                return [unclosed(body, self.closing)], rest, False
        return read_calls(body, self.name_key, self.arguments_key), rest, False


@dataclass(frozen=True)
class BareFormat(ToolFormat):
    """The whole turn is one JSON object, as in Llama 3; `opening`, such as `<|python_tag|>`, may precede it.

    Several objects may follow each other, separated by a semicolon or comma, or form a list; the text after them is
    content. An object without arguments is a call only if it names a tool, because an answer may be JSON too.
    """

    opening: str = "<|python_tag|>"
    name_key: str = "name"
    arguments_key: str = "parameters"

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedTurn:
        """See `ToolFormat.parse`."""
        thought, rest = split_thought(text)
        body = rest.strip()
        opened = bool(self.opening) and body.startswith(self.opening)
        body = body.removeprefix(self.opening).strip() if opened else body
        if not opened and not body.startswith(("{", "[")):
            return ParsedTurn(text.strip())
        parts, behind = _objects(body)
        if not opened and not any(self._is_call(part, tools) for part in parts):
            return ParsedTurn(text.strip())
        calls = [call for part in parts for call in read_calls(part, self.name_key, self.arguments_key)]
        return ParsedTurn(f"{thought}{behind}".strip(), tuple(calls))

    def _is_call(self, body: str, tools: ToolSchemas) -> bool:
        """Return whether an object is meant as a call; an unreadable one is if it has both keys."""
        keys = {self.arguments_key, *_ARGUMENTS}
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return f'"{self.name_key}"' in body and any(f'"{key}"' in body for key in keys)
        names = {tool.get("function", tool).get("name") for tool in tools}
        values = [_call_itself(each) for each in (value if isinstance(value, list) and value else [value])]
        return all(
            isinstance(each, dict)
            and self.name_key in each
            and bool(keys & each.keys() or each[self.name_key] in names)
            for each in values
        )

    def certain_content(self, text: str) -> str:
        """See `ToolFormat.certain_content`."""
        thought, rest = split_thought(text)
        body = rest.lstrip()
        possible = not body or body.startswith(("{", "[")) or _begins_alike(body, self.opening)
        return (thought if possible else text).strip()


HERMES = TaggedFormat()


def read_calls(body: str, name_key: str = "name", arguments_key: str = "arguments") -> list[ToolCall | MalformedCall]:
    """Return the call, or list of calls, in a JSON text; anything else is a malformed call."""
    try:
        value = json.loads(body.strip(), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        return [malformed(body, f"it is not JSON ({short(error)})")]
    values = value if isinstance(value, list) and value else [value]
    return [call_of(each, body, name_key, arguments_key) for each in values]


def call_of(
    value: object, body: str, name_key: str = "name", arguments_key: str = "arguments"
) -> ToolCall | MalformedCall:
    """Return the call of a JSON value, or a malformed one; `body`: its text, for the error."""
    value = _call_itself(value)
    if not isinstance(value, dict):
        return malformed(body, "it is not a JSON object")
    name = value.get(name_key)
    if not isinstance(name, str) or not name:
        return malformed(body, f'it has no "{name_key}" that is a string')
    # Models confuse the keys of the two common forms.
    given = [key for key in dict.fromkeys((arguments_key, *_ARGUMENTS)) if key in value]
    full = [key for key in given if value[key] not in (None, "", {})]
    if len(full) > 1:
        return malformed(body, f'it has both "{full[0]}" and "{full[1]}"')
    arguments_key = next(iter([*full, *given]), arguments_key)
    others = sorted(value.keys() - {name_key, *given, "id", "type"})
    if others and arguments_key not in value:
        return malformed(body, f'it has "{others[0]}" instead of "{arguments_key}"')
    arguments = value.get(arguments_key)
    if isinstance(arguments, str):  # an object as JSON text, as in OpenAI's API
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, parse_constant=no_constant)
    if arguments is None or arguments == "":  # of a tool without parameters
        arguments = {}
    if not isinstance(arguments, dict):
        return malformed(body, f'"{arguments_key}" is not a JSON object')
    reason = unusable({name: arguments})
    return malformed(body, reason) if reason else ToolCall(name, arguments)


def _call_itself(value: object) -> object:
    """Return the inner object of a call in OpenAI's form, `{"type": "function", "function": {...}}`."""
    inner = value.get("function") if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else value


def unusable(value: object) -> str:
    """Return why a JSON value cannot be written, hashed and sent to other processes; empty if it can."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for each in level:
            if isinstance(each, str) and not each.isascii() and each != each.encode(errors="replace").decode():
                return "a string in it is not text (half of a surrogate pair)"
            if (isinstance(each, float) and not math.isfinite(each)) or (
                isinstance(each, int) and abs(each) >= MAX_INTEGER
            ):
                return "a number in it is too large; write it as a string"
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [
            inner for each in containers for inner in ([*each, *each.values()] if isinstance(each, dict) else each)
        ]
        if not level:
            return ""
    return f"it is nested more than {MAX_DEPTH} levels deep"


def malformed(body: str, reason: str) -> MalformedCall:
    """Return a malformed call with its error for the model."""
    quoted = body.strip()
    quoted = quoted if len(quoted) <= _QUOTED else f"{quoted[:_QUOTED]}..."
    return MalformedCall(body, f"the tool call cannot be read: {reason}: {quoted}")


def unclosed(body: str, closing: str) -> MalformedCall:
    """Return a malformed call whose end is missing."""
    return malformed(body, f"{closing} is missing")


def loose(text: str) -> str:
    """Return the pattern of a template's text with any or no white space between its parts."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+|(?<=>)(?=<)", text) if part)


def no_constant(name: str) -> object:
    """Refuse NaN and infinities, which Python's JSON allows and the standard does not."""
    raise ValueError(f"{name} is not JSON")


def short(error: BaseException) -> str:
    """Return why a text is not JSON, briefly, for the model."""
    return str(error)[:_QUOTED] if isinstance(error, ValueError) else "nested too deeply"


def split_thought(text: str, opening: str = "<tool_call>") -> tuple[str, str]:
    """Return the reasoning with its tags, and the text after it, which is empty if the reasoning has not ended.

    `opening` begins a call: an end tag inside an argument does not end any reasoning.
    """
    thought, found, rest = text.partition(_THOUGHT)
    if found and opening not in thought.partition(_THINK)[0]:
        return thought + found, rest
    if not found and text.lstrip().startswith(_THINK):
        return text, ""
    return "", text


def overlap(text: str, opening: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `opening`."""
    most = min(len(text), len(opening) - 1)
    return next((size for size in range(most, 0, -1) if opening.startswith(text[-size:])), 0)


def _begins_alike(text: str, opening: str) -> bool:
    size = min(len(text), len(opening))
    return size > 0 and text[:size] == opening[:size]


def _json_end(text: str) -> int:
    """Return where the first JSON value of a text ends; the text's end if there is none."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


def json_values(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield (start, end, value) of each JSON object and list in a text, also of nested ones."""
    for found in re.finditer(r"[{\[]", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        yield found.start(), end, value


def _objects(body: str) -> tuple[list[str], str]:
    """Return the JSON objects at the beginning of a text, separated by semicolons or commas, and what follows them."""
    found: list[str] = []
    while not found or body.startswith("{"):
        end = _json_end(body)
        found.append(body[:end])
        body = body[end:].lstrip("; \n\t\r")
        if body.startswith(",") and body[1:].lstrip().startswith("{"):
            body = body[1:].lstrip()
        if not body:
            break
    return found, body
