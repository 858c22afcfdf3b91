"""The type of the fields that are passed to a library, alongside the base class of all config sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from megarl.common.options import Section

__all__ = ["Passed", "Section"]


def _all_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinities and NaN inside a value whose fields have no declared types."""
    for name, value in _leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("not_finite", "{name} must be a finite number", {"name": name, "value": value})
    return values


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of everything in nested mappings and lists that is neither."""
    items: Iterable[tuple[object, object]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{name}.{key}" if name else str(key))


Passed = Annotated[dict[str, Any], AfterValidator(_all_finite)]
"""Fields that are passed by name to a library or a user's function."""
