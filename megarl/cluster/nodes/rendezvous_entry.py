"""The entry point by which torchrun finds the rendezvous backend `megarl`. Every torchrun of the user imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.cluster.nodes.rendezvous_mark import NAME

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one agent, see `megarl.cluster.nodes.rendezvous`.

    torchrun calls it in its own process, whose report of failed ranks becomes short (see `failed_ranks`), and which
    then leaves no directory (see `torchrun_logs`) and does not cut a save after a stop signal (see `torchrun_end`).
    """
    from megarl.cluster.nodes.failed_ranks import replace_report  # torch's modules import this one
    from megarl.cluster.nodes.rendezvous import open_rendezvous
    from megarl.cluster.nodes.torchrun_end import wait_for_ranks
    from megarl.cluster.nodes.torchrun_logs import keep_no_logs

    replace_report()
    keep_no_logs()
    wait_for_ranks()
    return open_rendezvous(params)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler."""
    return create


def register() -> None:
    """Make the backend known in this process: an installation made before the entry point does not list it."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(NAME, create)
