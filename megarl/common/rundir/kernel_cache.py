"""The place of torch's compiled kernels, from which code is loaded: a directory that only its user writes to.

torch's own default, /tmp/torchinductor_USER (torch 2.13, _inductor/runtime/cache_dir_utils.py), is a name that another
user can take first, and torch does not look whose directory it is.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_kernels(otherwise: Callable[[], Path]) -> None:
    """Let torch, in this process and its later children, keep kernels for later runs of the user.

    Does nothing if the environment names a directory, which is the user's choice. The directory is
    $XDG_CACHE_HOME/megarl/torchinductor, ~/.cache by default. If it cannot be made, or others may write to it, kernels
    are kept for this run only, in the directory of mode 0700 that `otherwise` returns.
    """
    if VARIABLE in os.environ:
        return
    try:
        os.environ[VARIABLE] = str(_of_user())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        directory = otherwise()
        logger.warning("compiled kernels are kept for this run only, in %s: %s", directory, error)
        os.environ[VARIABLE] = str(directory / "torchinductor")


def _of_user() -> Path:
    """Return the directory. Raises PermissionError if it is another user's or others may write to it, or OSError."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megarl"
    directory = base / "torchinductor"
    for each in (base, directory):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)  # not in one call: parents are made by the umask
        status = each.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{each} belongs to another user, or others may write to it (chmod go-w)")
    return directory
