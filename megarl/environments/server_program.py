"""Serves one environment of verifiers, with the Python of the environment's virtual environment.

The first line of standard input is JSON: `address`, and `environment`, verifiers' EnvConfig. The input ends with the
run; then this process and everything it started are killed. megarl does not import this module.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import Any


def end_with_the_run() -> None:
    """Wait for the end of standard input, then kill the process group."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def on_this_machine(environment: dict[str, Any]) -> dict[str, Any]:
    """Return verifiers' EnvConfig with a local process for each role without a configured runtime.

    By default verifiers would use a sandbox of Prime Intellect. Roles are `agent`, or the environment's names.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    found = dict(environment)
    config = env_config_type(found["taskset"]["id"], found.get("id", ""))
    for name, declared in config.model_fields.items():
        role = declared.default
        if isinstance(role, AgentConfig) and "runtime" not in role.model_fields_set:
            found[name] = {"runtime": {"type": "subprocess"}, **found.get(name, {})}
    return found


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
        content = on_this_machine(asked["environment"])
        serve_env(max_workers=1, address=asked["address"], config_data=content)
    finally:
        # Otherwise programs started by the environment would outlive it.
        sys.stdout.flush()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
