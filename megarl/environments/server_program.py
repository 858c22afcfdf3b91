"""Serves one environment of verifiers; run by the Python of the environment's own virtual environment.

The first line of the standard input is JSON: `address`, and `environment`, verifiers' EnvConfig. When the input ends,
the run has ended, and this process and all that it has started are killed. megarl itself does not import this module.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading


def end_with_the_run() -> None:
    """Wait for the end of the standard input; kill the process group then."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until killed."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 1)):
            return
        line += more
    asked = json.loads(line)
    threading.Thread(target=end_with_the_run, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from verifiers.v1.serve.pool import serve_env

    try:
        serve_env(max_workers=1, address=asked["address"], config_data=asked["environment"])
    finally:
        # Programs that the environment has started outlive it otherwise.
        sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
