"""Keeps torchrun from leaving a directory in the system's temporary directory.

torchrun (torch 2.13, elastic/multiprocessing/api.py) makes one, `torchelastic_*`, at each start and never removes it.
It is for redirected output and for error files, and megarl's ranks write neither. `--log-dir /dev/null` is torchrun's
way to do without. megarl's own commands pass it, so that nothing is left after a SIGKILL at any moment either.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

_reify = DefaultLogsSpecs.reify


def keep_no_logs() -> None:
    """Remove the directory of a torchrun in this process before it starts ranks, unless the user asked for it."""
    DefaultLogsSpecs.reify = _without_directory  # type: ignore[method-assign,assignment]


def _without_directory(specs: DefaultLogsSpecs, envs: dict[int, dict[str, str]]) -> LogsDest:
    root = Path(specs.root_log_dir)
    redirected = (specs._redirects, specs._tee) != (Std.NONE, Std.NONE)
    if re.fullmatch(r"torchelastic_[a-z0-9_]{8}", root.name) and not redirected:
        with contextlib.suppress(OSError):  # it is not empty: somebody uses it
            root.rmdir()
            specs._root_log_dir = os.devnull
    return _reify(specs, envs)
