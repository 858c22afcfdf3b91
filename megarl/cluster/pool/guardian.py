"""The guardian: a process that briefly outlives the supervisor and kills what a killed or stuck one leaves behind.

`python -m megarl.cluster.pool.guardian STATE_FILE DIRECTORY PID START_TIME AGENT_PID AGENT_START_TIME PATIENCE_S`
watches the supervisor (PID) and the agent whose end ends the pool. When the supervisor is gone, it kills every child
that it has seen or that STATE_FILE records, by pid and start time. Then it removes the supervisor's private directory.
If the agent has been gone for PATIENCE_S seconds and the supervisor still runs, it kills the supervisor too, which
should have torn down the pool by then. After an orderly tear-down no child and no directory is left. Ray's own
processes usually end by themselves, but some take a while, and one that hangs does not.
"""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from megarl.common.process.processes import ProcessId, descendants, is_alive, still_alive, sweep
from megarl.common.rundir.private_directory import remove_private_directory

POLL_S = 0.5
SCAN_S = 5.0  # between two looks at all processes of the host
TERMINATE_S = 1.0  # between SIGTERM and SIGKILL


def main() -> None:
    """Wait for the processes in the arguments to end, then kill what they left behind."""
    state_file, private = Path(sys.argv[1]), Path(sys.argv[2])
    numbers = [int(text) for text in sys.argv[3:7]]
    supervisor, agent = ProcessId(*numbers[:2]), ProcessId(*numbers[2:])
    seen = wait_for_end(supervisor, agent, float(sys.argv[7]))
    own = ProcessId.own()
    children = (seen | recorded_children(state_file, supervisor)) - {own}
    if is_alive(supervisor):
        # The supervisor first: its watch would mistake the end of a child for a failure of the pool.
        sweep({supervisor}, grace_s=0.0)
    sweep(children, grace_s=TERMINATE_S)
    remove_private_directory(private)


def wait_for_end(supervisor: ProcessId, agent: ProcessId, patience_s: float) -> set[ProcessId]:
    """Return when the supervisor is gone, or the agent for `patience_s` seconds, with the children seen until then."""
    seen: set[ProcessId] = set()
    gone_at: float | None = None
    scanned_at = -SCAN_S
    while is_alive(supervisor):
        now = time.monotonic()
        if gone_at is None and not is_alive(agent):
            gone_at, scanned_at = now, -SCAN_S
        if now >= scanned_at + SCAN_S:
            scanned_at = now
            seen = still_alive(seen | descendants(supervisor.pid))
        if gone_at is not None and now > gone_at + patience_s:
            return seen | descendants(supervisor.pid)
        time.sleep(POLL_S)
    return seen


def recorded_children(state_file: Path, supervisor: ProcessId) -> set[ProcessId]:
    """Return the children in the supervisor's state file; none if it is a later launch's or cannot be read."""
    try:
        state = json.loads(state_file.read_text())
        if ProcessId(**state["process"]) != supervisor:
            return set()
        return {ProcessId(**child) for child in state["children"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        with suppress(OSError):  # the log's disk may be full
            sys.stderr.write(f"guardian: {state_file} cannot be read: {error}\n")
        return set()


if __name__ == "__main__":
    main()
