"""torchrun with megarl's rendezvous, and without its report of ranks that have reported themselves.

`megarl train` becomes it, and the nodes' agents start it: `python -m megarl.cluster.nodes.torchrun`.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from megarl.cluster.nodes.rendezvous_entry import register


def run() -> int:
    """Run torchrun with this process's arguments; return its exit status, that of the rank that failed first.

    A rank that ends with a status of its own has told the user why; of one that a signal has killed a line is written.
    """
    register()
    # The first logs the status of each failed rank, and that it ends the others; the second hints about options.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.ERROR)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        sys.stderr.write(f"megarl: rank {rank} was killed by {name} (pid {failure.pid}), and the others were ended\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
