"""The guardian: a process that outlives the supervisor briefly and kills what a killed supervisor leaves behind.

`python -m megarl.cluster.guardian STATE_FILE PID START_TIME DIRECTORY` waits until that process is gone, then kills
every child that the process has recorded in STATE_FILE, by pid and start time, and removes the process's private
directory. After an orderly tear-down neither is left. Ray's own processes usually end by themselves, but some take a
while, and one that hangs does not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from megarl.common.private_directory import remove_private_directory
from megarl.common.processes import ProcessId, is_alive, sweep

POLL_S = 0.5
TERMINATE_S = 1.0  # between SIGTERM and SIGKILL


def main() -> None:
    """Wait for the end of the process that the arguments name, then kill what it has left."""
    state_file, supervisor = Path(sys.argv[1]), ProcessId(int(sys.argv[2]), int(sys.argv[3]))
    while is_alive(supervisor):
        time.sleep(POLL_S)
    state = json.loads(state_file.read_text())
    # A later launch may have replaced the file.
    if ProcessId(**state["process"]) == supervisor:
        children = {ProcessId(**child) for child in state["children"]}
        sweep({child for child in children if child.pid != os.getpid()}, grace_s=TERMINATE_S)
    remove_private_directory(Path(sys.argv[4]))


if __name__ == "__main__":
    main()
