"""torchrun with megarl's rendezvous, and without its report of ranks that have reported themselves.

`megarl train` becomes it, and the nodes' agents start it: `python -m megarl.cluster.torchrun.run`.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.run import main

from megarl.cluster.torchrun.entry import register
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, other_holder
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE

# torchrun's report of failed ranks, without what the ranks have reported themselves.


def quieten_torchrun() -> None:
    """Silence torchrun's log of failed ranks: their statuses, the end of the others, and hints about options.

    Its line about a stop signal is silenced too, because the ranks report that.
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for name in ("torch.distributed.elastic.agent.server.api", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.ERROR)


def report_failure(error: ChildFailedError) -> int:
    """Report what the ranks could not; return the exit status of the rank that failed first, 1 if a signal ended it.

    A rank that exits by itself has reported why. If a signal killed it, this writes a line.
    """
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return int(failure.exitcode)
    name = signal.Signals(-failure.exitcode).name
    reason = f"rank {rank} was killed by {name} (pid {failure.pid}), and the others were ended"
    sys.stderr.write(f"megarl: {reason}\n")
    record_failure(reason)
    return 1


def record_failure(reason: str) -> None:
    """Put what only torchrun's agent knows before the reason in exit.json, if the run's directory is known.

    If a rank is killed, the others report only a closed connection. Writes nothing if another run holds the directory.
    """
    if not (directory := os.environ.get(RUN_DIR_VARIABLE)):
        return
    run_dir = Path(directory)
    mine = Holder.here("torchrun", ProcessId.own(), os.environ.get(LAUNCH_ID_VARIABLE))
    if other_holder(run_dir, mine) is not None:
        return
    try:
        before = run_files.read_exit(run_dir)
        if before is None or before.status == "failed":
            step, rest = (before.step, f": {before.reason}") if before is not None else (0, "")
            run_files.write_exit(run_dir, run_files.ExitRecord("failed", step, reason + rest))
    except (OSError, run_files.ExitRecordError) as error:
        sys.stderr.write(f"megarl: the reason could not be written to {run_dir}: {error}\n")


def run() -> int:
    """Run torchrun with this process's arguments; return its exit status, that of the rank that failed first.

    After a stop signal, which the ranks report, it is 128 plus the signal's number.
    """
    register()
    quieten_torchrun()
    try:
        main()
    except ChildFailedError as error:
        return report_failure(error)
    except RendezvousStateError as error:
        sys.stderr.write(f"megarl: {error}\n")
        record_failure(str(error))
        return 1
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run())
