"""The base class of all config sections, and the type of the fields that are passed to a library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A config section: unknown keys are errors, values are immutable.

    Infinities and NaN are refused, because the config is sent to the rollout pool as JSON, which would make them null.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


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
