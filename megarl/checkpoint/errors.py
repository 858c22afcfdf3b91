"""What the converter says when it stops: one message, no traceback."""

from __future__ import annotations

import errno


class ConversionError(ValueError):
    """A conversion cannot go on; the message names the file and the remedy."""


def from_os_error(error: OSError, doing: str) -> ConversionError:
    """A full disk, a missing permission, … while `doing`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return ConversionError(f"{what} ({doing}); make room and go on with --resume")
    where = f": {error.filename}" if error.filename else ""
    return ConversionError(f"{doing}{where}: {error.strerror or error}")
