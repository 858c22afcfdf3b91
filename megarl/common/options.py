"""The base class of a user's settings: config sections, and the options of a loss or an advantage."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator


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
