"""The base class of config sections, and the type of fields that are passed to a library."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from megarl.common.options import Section
from megarl.common.values import leaves

__all__ = ["Passed", "Section"]


def _all_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinities and NaN in a value whose fields have no declared types."""
    for name, value in leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("not_finite", "{name} must be a finite number", {"name": name, "value": value})
    return values


Passed = Annotated[dict[str, Any], AfterValidator(_all_finite)]
"""Fields that are passed by name to a library or a user's function."""
