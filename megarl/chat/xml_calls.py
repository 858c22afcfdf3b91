"""Tool calls that a model writes as tags with one element per argument, as Qwen3-Coder, Qwen3.5 and GLM-4.5 do. Pure.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Templates escape nothing inside a value. So a value ends at the first end tag that another argument, or the end of the
call, follows: a value may hold any tag by itself, and only a value with that whole sequence is read as a shorter one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.chat.declared_values import parameters_of, read_value
from megarl.chat.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolFormat,
    ToolSchemas,
    loose,
    malformed,
    unclosed,
    unusable,
)

# Without white space at its ends; in a form that takes linear time, whatever a model writes.
_KEY = r"[^\s<>](?:[^\n<>]*[^\s<>])?"


@dataclass(frozen=True)
class XmlFormat(ToolFormat):
    """The texts around the parts of a call: its name, and the key and the value of each argument.

    White space between tags may differ from the template's. White space at the ends of a value belongs to it, except
    that of the template: at the end of `before_value`, and at the beginning of `after_value`.
    """

    opening: str = "<tool_call>"
    before_name: str = "<function="
    after_name: str = ">"
    before_key: str = "<parameter="
    before_value: str = ">\n"
    after_value: str = "\n</parameter>"
    closing: str = "</function>\n</tool_call>"

    def read(self, text: str, tools: ToolSchemas) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """See `ToolFormat.read`. The types of arguments are those that `tools` declare."""
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
            return self._unreadable(text, f"it does not go on with {self.before_key} or {_one_line(self.closing)}")
        body = text[: end.end()]
        return [_typed(head[1], found, parameters_of(tools, head[1]), body)], text[end.end() :], False

    def _unreadable(self, text: str, reason: str) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """Return the error of a call, and what follows its last tag."""
        last = self.closing[self.closing.rindex("<") :]
        body, found, rest = text.partition(last)
        return [malformed(body, reason) if found else unclosed(body, last)], rest, False

    def _bare(self, value: str) -> str:
        """Return a value without the white space that the template writes around it."""
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


def _typed(
    name: str, written: Mapping[str, str], schema: Mapping[str, Any], body: str
) -> ToolCall | MalformedCall:  # fmt: skip
    try:
        arguments = {key: read_value(text, schema, key) for key, text in written.items()}
    except ValueError as error:
        return malformed(body, str(error))
    if reason := unusable({name: arguments}):
        return malformed(body, reason)
    return ToolCall(name, arguments)


def _one_line(text: str) -> str:
    return "".join(text.split())


def learned(
    written: str, name: str, first: tuple[str, str], second: tuple[str, str]
) -> XmlFormat | None:  # fmt: skip
    """Return the format of a call `name` that has two arguments (key, text of the value); None if it has another form.

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
