"""The type of values that were read from JSON."""

from __future__ import annotations

from typing import Any, TypeAlias

# `json.loads` declares no other type: with a union of the possible ones every reader would have to narrow it first.
JsonValue: TypeAlias = Any
