"""Files that are replaced atomically: a reader sees either the old content or the new one."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON to a temporary file and rename it to `path`; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_private(path: Path, content: str) -> None:
    """Replace a file, at once as a whole, by one of mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
    temporary.replace(path)


def last_bytes(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, `most` at most; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most)
    except OSError:
        return b""


def finite(content: object) -> object:
    """Return JSON content with every NaN and infinity replaced by None, because JSON has no such numbers."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
