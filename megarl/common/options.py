"""The base class of what a user may set: config sections, and the options of a loss or of an advantage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings: unknown keys are errors, values are immutable.

    Infinities and NaN are refused, because the config is sent to the rollout pool as JSON, which would make them null.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)
