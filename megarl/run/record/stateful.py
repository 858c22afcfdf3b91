"""The parts of a run whose state a checkpoint keeps besides the trainer's own state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """A part whose state is JSON, stored in the checkpoint's record under `key`."""

    key: str

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store. Called on rank 0."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a stored state. Called on every rank."""
        ...


def collect(parts: Iterable[Stateful]) -> dict[str, Any]:
    """Return the states of all parts by key. Raises ValueError if two parts share a key."""
    record: dict[str, Any] = {}
    for part in parts:
        if part.key in record:
            raise ValueError(f"two parts of the run store their state under {part.key!r}")
        record[part.key] = part.state_dict()
    return record


def restore(parts: Iterable[Stateful], record: Mapping[str, Any]) -> None:
    """Load the state of every part from a record that `collect` made. Raises KeyError if one is missing."""
    for part in parts:
        part.load_state_dict(record[part.key])
