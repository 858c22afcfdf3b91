"""The report of ranks that have failed, as torchrun gives it: without what the ranks themselves have told the user."""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def quieten_torchrun() -> None:
    """Silence what torchrun logs of failed ranks: their statuses, that it ends the others, and hints about options.

    So is that it has received a stop signal, which the ranks tell.
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for name in ("torch.distributed.elastic.agent.server.api", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.ERROR)


def tell_failure(error: ChildFailedError) -> int:
    """Tell what the ranks could not, and return the exit status: that of the rank that failed first, 1 for a signal.

    A rank that ends with a status of its own has told the user why; of one that a signal has killed a line is written.
    """
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return int(failure.exitcode)
    name = signal.Signals(-failure.exitcode).name
    sys.stderr.write(f"megarl: rank {rank} was killed by {name} (pid {failure.pid}), and the others were ended\n")
    return 1
