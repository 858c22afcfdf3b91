"""The entry point by which torchrun finds the rendezvous backend `megarl`. Every torchrun of the user imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.cluster.torchrun import NAME

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of one agent, see `megarl.cluster.torchrun.rendezvous`. torchrun calls it in its own
    process."""
    from megarl.cluster.torchrun.rendezvous import open_rendezvous  # torch's modules import this module

    return open_rendezvous(params)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the function that makes a handler."""
    return create


def register() -> None:
    """Make the backend known in this process: an installation made before the entry point does not list it."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(NAME, create)
