"""Redirects everything that a process and its libraries print to a log file.

File descriptors 1 and 2 are redirected, not only `sys.stdout`, because NCCL, gloo and vLLM write from C++.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import TextIO


def redirect_output(log_file: Path) -> TextIO:
    """Append this process's stdout, stderr and logging to `log_file`; return a stream to the previous stderr."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    return terminal
