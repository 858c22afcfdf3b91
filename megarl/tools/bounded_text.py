"""Bounds on the answers of tools. Pure."""

from __future__ import annotations

MAX_CHARACTERS = 8_000


def bounded(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text of at most `limit` characters; of a longer one, beginning and end with a note between them.

    Raises ValueError if `limit` leaves no room for the note.
    """
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text) - limit} characters or more left out ...]\n"
    left = limit - len(note)
    if left < 2:
        raise ValueError(f"an answer of {limit} characters is too short for the note that it was cut")
    head = (left + 1) // 2
    return text[:head] + note + text[len(text) - (left - head) :]
