"""Tool calls written as tags with one element per argument, as by Qwen3-Coder, Qwen3.5 and GLM-4.5. Pure.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Templates escape nothing inside a value. So a value ends at the first end tag before another argument or the end of the
call. A value may contain any single tag; only a value with that whole sequence is cut short.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.chat.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolFormat,
    ToolSchemas,
    loose,
    malformed,
    no_constant,
    unclosed,
    unusable,
)

# Without white space at its ends; matches in linear time, whatever a model writes.
_KEY = r"[^\s<>](?:[^\n<>]*[^\s<>])?"


@dataclass(frozen=True)
class XmlFormat(ToolFormat):
    """The texts around the parts of a call: its name, and the key and value of each argument.

    White space between tags may differ from the template's. White space at the ends of a value belongs to it, except
    what the template adds: the end of `before_value` and the beginning of `after_value`.
    """

    opening: str = "<tool_call>"
    before_name: str = "<function="
    after_name: str = ">"
    before_key: str = "<parameter="
    before_value: str = ">\n"
    after_value: str = "\n</parameter>"
    closing: str = "</function>\n</tool_call>"

    def read(self, text: str, tools: ToolSchemas) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """See `ToolFormat.read`. `tools` declare the types of arguments."""
        head = self._head.match(text)
        if head is None:
            return self._unreadable(text, "it does not begin with the name of a tool")
        found: dict[str, str] = {}
        at = head.end()
        while key := self._key.match(text, at):
            value = self._value_end.search(text, key.end())
            if value is None:
                return self._unreadable(text, f"its argument {key[1]!r} has no {self.after_value.strip()}")
            if key[1] in found:
                return self._unreadable(text, f"it has two arguments {key[1]!r}")
            found[key[1]] = self._bare(text[key.end() : value.start()])
            at = value.end()
        end = self._end.match(text, at)
        if end is None:
            return self._unreadable(text, f"it does not continue with {self.before_key} or {_one_line(self.closing)}")
        body = text[: end.end()]
        return [_typed(head[1], found, parameters_of(tools, head[1]), body)], text[end.end() :], False

    def _unreadable(self, text: str, reason: str) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """Return the error of a call, and the text after its last tag."""
        last = self.closing[self.closing.rindex("<") :]
        body, found, rest = text.partition(last)
        return [malformed(body, reason) if found else unclosed(body, last)], rest, False

    def _bare(self, value: str) -> str:
        """Return a value without the white space that the template adds."""
        before = self.before_value[len(self.before_value.rstrip()) :]
        after = self.after_value[: len(self.after_value) - len(self.after_value.lstrip())]
        return value.removeprefix(before).removesuffix(after)

    @cached_property
    def _head(self) -> re.Pattern[str]:
        end = loose(self.after_name) or rf"(?={loose(self.before_key)}|{loose(self.closing)}|\s)"
        return re.compile(rf"\s*{loose(self.before_name)}\s*([^\s<>]+?)\s*{end}")

    @cached_property
    def _key(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{loose(self.before_key)}\s*({_KEY})\s*{loose(self.before_value)}")

    @cached_property
    def _value_end(self) -> re.Pattern[str]:
        more = rf"\s*(?:{loose(self.before_key)}|{loose(self.closing)})"
        return re.compile(rf"{loose(self.after_value)}(?={more})")

    @cached_property
    def _end(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{loose(self.closing)}")


def _typed(name: str, written: Mapping[str, str], schema: Mapping[str, Any], body: str) -> ToolCall | MalformedCall:
    try:
        arguments = {key: read_value(text, schema, key) for key, text in written.items()}
    except ValueError as error:
        return malformed(body, str(error))
    if reason := unusable({name: arguments}):
        return malformed(body, reason)
    return ToolCall(name, arguments)


def _one_line(text: str) -> str:
    return "".join(text.split())


def learned(written: str, name: str, first: tuple[str, str], second: tuple[str, str]) -> XmlFormat | None:
    """Return the format of a call `name` with two arguments (key, text of the value); None if it has another form.

    `written`: the call as a template writes it.
    """
    parts = []
    rest = written
    for known in (name, *first, *second):
        before, found, rest = rest.partition(known)
        if not found:
            return None
        parts.append(before)
    start, to_key, to_value, between, to_second_value = parts
    gap, tag, key = between.rpartition("<")
    before_key, after_value = tag + key, gap.rstrip()
    opening, bracket, before_name = start.lstrip().partition(">")
    opening += bracket
    if (
        not opening.startswith("<") or not bracket or not before_key.startswith("<")
        or not after_value.lstrip().startswith("</") or to_value != to_second_value
        or not to_key.endswith(before_key) or not rest.startswith(after_value)
    ):  # fmt: skip
        return None
    closing = rest.removeprefix(after_value).strip()
    after_name = to_key.removesuffix(before_key).strip()
    if not closing.startswith("</"):
        return None
    return XmlFormat(opening, before_name.strip(), after_name, before_key, to_value, after_value, closing)


# Values are read by the types that the tool declares: `4` may be a number or a string. Chat templates write strings as
# they are, lists and objects as JSON, and other values as JSON or as Python does (`True`, `None`).
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "array": (list,), "object": (dict,),
}  # fmt: skip
_WORDS: dict[str, tuple[str, object]] = {
    "null": ("null", None), "None": ("null", None), "true": ("boolean", True), "True": ("boolean", True),
    "false": ("boolean", False), "False": ("boolean", False),
}  # fmt: skip


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of the tool `name`; empty if there is none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            found = function.get("parameters")
            return found if isinstance(found, Mapping) else {}
    return {}


def read_value(text: str, schema: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401  # any JSON value
    """Return the value of the argument `key` in a type that the JSON schema of all arguments declares.

    With several declared types, it is a string only if it is none of the others; without any, it is a string. Raises
    ValueError naming the declared types.
    """
    types = _types(_declared(schema, key), schema, set())
    word = text.strip()
    if word in _WORDS and _WORDS[word][0] in types:
        return _WORDS[word][1]
    if any(name in types for name in _JSON_TYPES):
        value = _json(word)
        for name, kinds in _JSON_TYPES.items():
            if name in types and isinstance(value, kinds) and not isinstance(value, bool):
                return value
        if "integer" in types and isinstance(value, float) and value.is_integer():
            return int(value)  # in JSON schema, 4.0 is an integer
    if not types or "string" in types:
        return text
    raise ValueError(f"its argument {key!r} must be of the type {' or '.join(sorted(types))}")


def _declared(schema: Mapping[str, Any], key: str) -> object:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def _types(declared: object, root: Mapping[str, Any], followed: set[str]) -> set[str]:
    """Return the names of the types that a schema allows; empty if it declares none. `followed`: references so far."""
    if not isinstance(declared, Mapping):
        return set()
    named = declared.get("type")
    if named:
        return {each for each in ([named] if isinstance(named, str) else named) if isinstance(each, str)}
    found: set[str] = set()
    reference = declared.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        found |= _types(_referred(reference, root), root, followed)
    for word in ("anyOf", "oneOf", "allOf"):
        for each in declared.get(word) or ():
            found |= _types(each, root, followed)
    allowed = [*(declared.get("enum") or ()), *([declared["const"]] if "const" in declared else ())]
    return found | {_type_of(value) for value in allowed}


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """Return the target of a reference within the schema, such as `#/$defs/Colour`, or None."""
    start, *path = reference.split("/")
    place: object = root if start == "#" else None
    for part in path:
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _type_of(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return next((name for name, kinds in _JSON_TYPES.items() if isinstance(value, kinds)), "string")


def _json(text: str) -> object:
    """Return the JSON value of a text; None if it is not JSON."""
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
