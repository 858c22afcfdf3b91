"""Tool calls written as the tool's name and its arguments in JSON, as by DeepSeek-V3.1. Pure.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megarl.chat.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolFormat,
    ToolSchemas,
    call_of,
    json_values,
    loose,
    malformed,
    no_constant,
    short,
    unclosed,
)

# A call must begin with a mark: a bare name cannot be distinguished from content.
_MARK = re.compile(r"<[^\s<>]|\[\w+\]")
_NAME = r"([^\s<>\[\](){}]+?)"
_NEVER = "(?!)"
_JSON = json.JSONDecoder(parse_constant=no_constant)


@dataclass(frozen=True)
class NamedFormat(ToolFormat):
    """The texts around names and arguments: `opening` NAME `separator` JSON `between` NAME `separator` JSON `closing`.

    White space after the opening may differ from the template's. With an empty `between`, each `opening` has one call;
    with an empty `closing`, the last call ends with its JSON.
    """

    opening: str
    separator: str
    between: str = ""
    closing: str = ""

    def read(self, text: str, tools: ToolSchemas) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """See `ToolFormat.read`."""
        head = self._head.match(text)
        if head is None:
            return self._unreadable(text, f"it does not begin with the name of a tool and {self.separator}")
        try:
            arguments, end = _JSON.raw_decode(text, head.end())
        except (ValueError, RecursionError) as error:
            return self._unreadable(text, f"its arguments are not JSON ({short(error)})")
        after = self._after.match(text, end)
        if after is None:
            return self._unreadable(text, f"its arguments do not continue with {self.closing}")
        call = call_of({"name": head[1], "arguments": arguments}, text[: after.end()])
        return [call], text[after.end() :], after["next"] is not None

    def _unreadable(self, text: str, reason: str) -> tuple[list[ToolCall | MalformedCall], str, bool]:
        """Return the error of a call, what follows its end, and whether that is another call."""
        end = self._end.search(text)
        if end is None:
            return [unclosed(text, self.closing) if self.closing else malformed(text, reason)], "", False
        return [malformed(text[: end.end()], reason)], text[end.end() :], end["next"] is not None

    @cached_property
    def _head(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_NAME}\s*{loose(self.separator)}\s*")

    @cached_property
    def _end(self) -> re.Pattern[str]:
        """The text after a call; the group `next` matches if another call follows."""
        following = loose(self.between) if self.between else _NEVER
        return re.compile(rf"(?P<next>{following})|{loose(self.closing) if self.closing else _NEVER}")

    @cached_property
    def _after(self) -> re.Pattern[str]:
        """The same after white space, or nothing if `closing` is empty."""
        return re.compile(rf"\s*(?:{self._end.pattern})" + ("" if self.closing else "|"))


def learned_by_name(one: str, two: str, name: str, arguments: Mapping[str, Any], call_id: str) -> NamedFormat | None:
    """Return the format of a call `name` with `arguments`; None if it has another form.

    `one`: the call as a template writes it; `two`: the same call twice in a turn, "" if it refuses that. `call_id`: its
    id, which must not appear in it.
    """
    before, found, rest = one.partition(name)
    start, end = next(((first, last) for first, last, value in json_values(rest) if value == arguments), (0, 0))
    separator, closing = rest[:start].strip(), rest[end:].strip()
    if not found or not end or not separator or not _MARK.match(before.strip()) or call_id in one:
        return None
    if two in ("", one):
        return NamedFormat(before.strip(), separator, "", closing)
    first = before + name + rest[:end]
    between, _, last = two.removeprefix(first).partition(name)
    if not two.startswith(first) or last != rest or not between.strip():
        return None
    return NamedFormat(before.strip(), separator, between.strip(), closing)
