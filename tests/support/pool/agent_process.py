"""A node's agent whose supervisor and torchrun are small shell scripts: `agent_process.py LAUNCH INDEX POOL RANKS`.

A process of its own, because an agent ends everything that descends from its process.
"""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

from megarl.cluster.nodes import commands, processes
from megarl.cluster.nodes.launcher import NodeLauncher
from megarl.cluster.nodes.spec import LaunchSpec


def shell(script: str, *args: Any, **kwargs: Any) -> list[str]:
    return ["sh", "-c", script]


def start(script: str, *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(shell(script), start_new_session=True)


if __name__ == "__main__":
    launch, index, pool, ranks = sys.argv[1:]
    processes.start_supervisor = functools.partial(start, pool)
    commands.torchrun_command = functools.partial(shell, ranks)
    commands.raylet_command = functools.partial(shell, "exec sleep 100")
    sys.exit(NodeLauncher(LaunchSpec.load(Path(launch)), int(index)).run())
