"""Small files that are replaced whole: a reader sees the old content or the new one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write JSON by rename (a reader sees the old file or the new one); NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def finite(content: Any) -> Any:
    """`content` with every NaN and infinity replaced by None, because JSON has no such numbers."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
