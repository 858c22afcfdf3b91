"""Errors of the operating system, told as a `ConversionError` that names the file and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.common.errors import ConversionError


def from_os_error(error: OSError, doing: str) -> ConversionError:
    """A full disk, a missing permission, … while `doing`."""
    file = error.filename2 or error.filename  # of two, the second is the one that is written
    where = f"{doing}: {file}" if file and str(file) not in doing else doing
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return ConversionError(f"{what} ({where}); make room and go on with --resume")
    return ConversionError(f"{where}: {error.strerror or error}")


@contextmanager
def writing(path: Path, tensor: Callable[[], str] = str) -> Iterator[None]:
    """An OSError inside becomes a ConversionError naming `path` and, if there is one, the tensor it happened at."""
    try:
        yield
    except OSError as error:
        at = f", at {name}" if (name := tensor()) else ""
        raise from_os_error(error, f"writing {path}{at}") from error
