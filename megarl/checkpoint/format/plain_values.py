"""Reads what `torch.save` has written, and refuses a file that holds more than tensors and plain values."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch


def load_plain(file: Path | BytesIO, *, mmap: bool | None = None) -> Any:  # noqa: ANN401  # whatever was saved
    """Return the content of `file`. Raises ValueError with a short reason if it is damaged or holds other objects.

    torch's own restricted unpickler reads it, whose list of names Megatron-Core extends by a few plain classes.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise
    except Exception as error:  # the error that torch raises depends on the content
        # torch replaces the reason by advice to turn the restriction off.
        reason = str(error.__context__ or error).strip() or type(error).__name__
        raise ValueError(reason.splitlines()[0]) from error
