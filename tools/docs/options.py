"""Generates docs/reference/keys.md from the config classes and the list of reserved Megatron fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.registry import FunctionRegistry
from megarl.algorithms.losses import LOSSES
from megarl.config.loading.load import level, ordered, section_of
from megarl.config.megatron.reserved import RESERVED
from megarl.config.schema import Config

_HEAD = """# Configuration keys

<!-- Generated from the config classes in megarl/config/ by `make docs`; do not edit. -->

Every key of a config, by section. [Configuration](../configuration.md) explains how a config works and shows the keys
that most runs set. Those are marked `basic` and come first; the others are `expert`. A key without a default is
required. A section may be left out if all its keys have defaults.
"""

_TAIL = """
## Fields of Megatron-Core that megarl sets

[`megatron.transformer`, `megatron.optimizer` and `megatron.ddp`](../configuration.md#passing-fields-to-megatron-core)
refuse these fields, because megarl sets them itself:
"""


def keys_page() -> str:
    """Return the whole page in Markdown."""
    parts = [_HEAD]
    shown = {section_of(field.annotation) for field in Config.model_fields.values()}
    for name in ordered(Config):
        field = Config.model_fields[name]
        section = section_of(field.annotation)
        if section is not None:
            parts += _section(section, f"{name}[]" if get_origin(field.annotation) is list else name, shown)
        if name == "algorithm":
            parts += [*_functions(LOSSES, f"{name}.loss_options"), *_functions(ADVANTAGES, f"{name}.advantage_options")]
    parts.append(_TAIL)
    for target, fields in RESERVED.items():
        parts.append(f"\n| `megatron.{target}` | reason, or key to set instead |\n|---|---|\n")
        by_reason: dict[str, list[str]] = {}
        for field_name, reason in fields.items():
            by_reason.setdefault(reason, []).append(field_name)
        for reason, names in by_reason.items():
            parts.append(f"| {', '.join(f'`{each}`' for each in sorted(names))} | {_cell(reason)} |\n")
    return "".join(parts)


def _functions(registry: FunctionRegistry[Any, Any], key: str) -> Iterator[str]:
    """Yield a heading and a table of the options of all registered functions of one kind."""
    yield f"\n### `{key}`\n\nThe options of each {registry.kind}; one's own has those of its class of options.\n\n"
    yield f"| {registry.kind} | key | type | default | meaning |\n|---|---|---|---|---|\n"
    for entry in registry:
        about = f"`{entry.name}`: {_cell(entry.title)} ({entry.paper})"
        fields = entry.options.model_fields if entry.options is not None else {}
        if not fields:
            yield f"| {about} | none |  |  |  |\n"
        for name, field in fields.items():
            meaning = _cell(field.description or "")
            yield f"| {about} | `{name}` | {_type(field)} | {_default(field)} | {meaning} |\n"
            about = ""


def _section(section: type[BaseModel], prefix: str, shown: set[type[BaseModel] | None]) -> Iterator[str]:
    """Yield heading, description and table of a section, then those of the sections inside it that are not `shown`."""
    yield f"\n## `{prefix}`\n\n{(section.__doc__ or '').strip()}\n\n"
    inner: list[tuple[type[BaseModel], str]] = []
    rows = []
    dotted = prefix.replace("[]", "")
    for name in ordered(section, f"{dotted}."):
        field = section.model_fields[name]
        nested = section_of(field.annotation)
        if nested in shown:
            nested = None
        shown.add(nested)
        key = f"{prefix}.{name}"
        if nested is not None and get_origin(field.annotation) is not list:
            inner.append((nested, key))
            continue
        if nested is not None:
            inner.append((nested, f"{key}[]"))
        described = f"{_type(field)} | {_default(field)} | {_cell(field.description or '')}"
        rows.append(f"| `{name}` | {level(f'{dotted}.{name}')} | {described} |\n")
    if rows:
        yield "| key | level | type | default | meaning |\n|---|---|---|---|---|\n"
        yield from rows
    for nested, key in inner:
        yield from _section(nested, key, shown)


def _type(field: FieldInfo) -> str:
    """Return the type of a field with its bounds, for a table cell."""
    text = _type_name(field.annotation)
    bounds = _bounds(field.metadata)
    return _cell(f"{text}, {', '.join(bounds)}" if bounds else text)


def _bounds(metadata: Iterable[object]) -> list[str]:
    bounds = []
    for limit in metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if hasattr(limit, attribute):
                bounds.append(f"{sign} {getattr(limit, attribute)}")
    return bounds


def _type_name(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        inner = [limit for part in arguments[1:] for limit in getattr(part, "metadata", [part])]
        return " ".join([_type_name(arguments[0]), *_bounds(inner)])
    if origin in (Union, UnionType):
        options = [_type_name(each) for each in arguments if each is not type(None)]
        return " or ".join([*options, "null"] if len(options) < len(arguments) else options)
    if origin in (list, tuple):
        return f"{'list of' if origin is list else f'{len(arguments)} x'} {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    names: dict[object, str] = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "path"}
    return names.get(annotation, "section" if section_of(annotation) else str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "the defaults of these keys"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`" if value != "" else "empty"


def _cell(text: str) -> str:
    """Put a text on one line and escape it for a table cell."""
    return " ".join(text.split()).replace(" | ", " \\| ")
