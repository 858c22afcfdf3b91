"""torchrun with megarl's rendezvous, and without its report of ranks that have reported themselves.

`megarl train` becomes it, and the nodes' agents start it: `python -m megarl.cluster.torchrun.run`.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from megarl.cluster.torchrun.entry import register
from megarl.cluster.torchrun.failed_ranks import quieten_torchrun, tell_failure


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
