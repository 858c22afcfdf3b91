"""Converts errors of the operating system into a `ConversionError` that names the file and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.common.errors import ConversionError


def from_os_error(error: OSError, doing: str) -> ConversionError:
    """Return the ConversionError for `error` (a full disk, a missing permission, …), which occurred while `doing`."""
    file = error.filename2 or error.filename  # of two files, the second is the one that is written
    where = f"{doing}: {file}" if file and str(file) not in doing else doing
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return ConversionError(f"{what} ({where}); free space and continue with --resume")
    return ConversionError(f"{where}: {error.strerror or error}")


@contextmanager
def writing(path: Path, tensor: Callable[[], str] = str) -> Iterator[None]:
    """Convert an OSError inside into a ConversionError that names `path` and, if there is one, the current tensor."""
    try:
        yield
    except OSError as error:
        at = f", at {name}" if (name := tensor()) else ""
        raise from_os_error(error, f"writing {path}{at}") from error
