"""torchrun with megarl's rendezvous: the nodes' agents start it by `python -m megarl.cluster.nodes.torchrun`."""

from __future__ import annotations

from torch.distributed.run import main

from megarl.cluster.nodes.rendezvous_entry import register

if __name__ == "__main__":
    register()
    main()
