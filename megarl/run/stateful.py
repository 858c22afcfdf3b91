"""Parts of a run that a checkpoint keeps beside the trainer's own state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """A part whose state is JSON, stored in the checkpoint's record under `key`."""

    key: str

    def state_dict(self) -> Any:
        """The state to store; called on rank 0."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go back to a stored state; called on every rank."""
        ...


def collect(parts: Iterable[Stateful]) -> dict[str, Any]:
    """The record of all parts. ValueError if two parts share a key."""
    record: dict[str, Any] = {}
    for part in parts:
        if part.key in record:
            raise ValueError(f"two parts of the run store their state under {part.key!r}")
        record[part.key] = part.state_dict()
    return record


def restore(parts: Iterable[Stateful], record: Mapping[str, Any]) -> None:
    """Give every part its state back."""
    for part in parts:
        part.load_state_dict(record[part.key])
