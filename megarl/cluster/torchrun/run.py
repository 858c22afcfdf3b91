"""torchrun with megarl's rendezvous, and without its report of ranks that have reported themselves.

`megarl train` becomes it, and the nodes' agents start it: `python -m megarl.cluster.torchrun.run`.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from megarl.cluster.torchrun.entry import register

# The report of ranks that have failed, as torchrun gives it: without what the ranks have reported themselves.


def quieten_torchrun() -> None:
    """Silence what torchrun logs of failed ranks: their statuses, that it ends the others, and hints about options.

    So is that it has received a stop signal, which the ranks report.
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for name in ("torch.distributed.elastic.agent.server.api", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.ERROR)


def tell_failure(error: ChildFailedError) -> int:
    """Tell what the ranks could not, and return the exit status: that of the rank that failed first, 1 for a signal.

    A rank that ends with a status of its own has reported why; of one that a signal has killed a line is written.
    """
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return int(failure.exitcode)
    name = signal.Signals(-failure.exitcode).name
    sys.stderr.write(f"megarl: rank {rank} was killed by {name} (pid {failure.pid}), and the others were ended\n")
    return 1


def run() -> int:
    """Run torchrun with this process's arguments; return its exit status, that of the rank that failed first.

    After a stop signal, which torchrun passes on and of which the ranks tell, it is 128 and the signal's number.
    """
    register()
    quieten_torchrun()
    try:
        main()
    except ChildFailedError as error:
        return tell_failure(error)
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run())
