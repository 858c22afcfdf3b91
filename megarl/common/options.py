"""The base class of a user's settings: config sections, and the options of a loss or an advantage."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from megarl.common.values import leaves


class Section(BaseModel):
    """A group of settings: unknown keys are errors, values are immutable.

    Infinities and NaN are refused, because the config is sent to the rollout pool as JSON, which would make them null.
    `~` at the beginning of a path is the user's own directory. A key's description is that of its `Field`, or the text
    below it.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _expanded(cls, value: object) -> object:
        return value.expanduser() if isinstance(value, Path) else value


def _all_finite(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinities and NaN in a value whose fields have no declared types."""
    for name, value in leaves(values):
        if isinstance(value, float) and not math.isfinite(value):
            raise PydanticCustomError("not_finite", "{name} must be a finite number", {"name": name, "value": value})
    return values


Passed = Annotated[dict[str, Any], AfterValidator(_all_finite)]
"""Fields that are passed by name to a library or a user's function."""
