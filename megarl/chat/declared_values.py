"""The values of arguments that a model has written as plain text, read by the types that the tool declares. Pure.

Such a text has no types of its own: `4` may be a number or a string. A chat template writes strings as they are, lists
and objects as JSON, and the others as JSON or as Python does (`True`, `None`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.chat.tool_calls import no_constant

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "array": (list,), "object": (dict,),
}  # fmt: skip
_WORDS: dict[str, tuple[str, object]] = {
    "null": ("null", None), "None": ("null", None), "true": ("boolean", True), "True": ("boolean", True),
    "false": ("boolean", False), "False": ("boolean", False),
}  # fmt: skip


def parameters_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of the tool `name`; empty if there is no such tool, or it has none."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            found = function.get("parameters")
            return found if isinstance(found, Mapping) else {}
    return {}


def read_value(text: str, schema: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401  # any JSON value
    """Return the value of the argument `key`, whose types the JSON schema of all arguments declares.

    A value of several possible types is a string only if it is none of the others. One without a declared type is a
    string. Raises ValueError that tells which types were declared.
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
            return int(value)  # JSON schema knows 4.0 as an integer
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
    """Return what a reference within the schema means, such as `#/$defs/Colour`; None if there is no such thing."""
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
    """Return the JSON value of a text; None if it is none."""
    try:
        return json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
