"""Imports the users' functions and classes that a config names."""

import importlib
import traceback
from typing import Any


def imported(path: str, what: str) -> Any:  # noqa: ANN401  # whatever a user has defined there
    """Return what the import path `package.module:name` names; the name may have dots. `what`: its place, for messages.

    Raises ValueError with the cause, and with the failing line of the user's module.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}{_line_of(error)}"
        raise ValueError(f"{what} {path!r} cannot be imported: {cause}") from error
    return found


def _line_of(error: Exception) -> str:
    """Return the line of the user's module that has failed, as ` (FILE:LINE)`; empty if the import found no module."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen ")]
    own = [each for each in frames if each.filename not in (__file__, importlib.__file__)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
