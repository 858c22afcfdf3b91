"""The process groups by which the members of a weight sync broadcast: gloo on CPU, NCCL on CUDA.

Engines on the trainer's GPUs are in no such group: the trainer ranks relay the weights to them (`relay.py`).

Tensors may have any shape.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from megarl.weights.group import relay
from megarl.weights.group.relay import Backend, MemberPlace


@dataclass(frozen=True)
class BackendKind:
    """One way in which members communicate. `make` connects one member."""

    device: str  # the type of the device whose tensors are sent
    on_streams: bool  # operations run on streams of the device, not on the host
    make: Callable[[PrefixStore, MemberPlace], Backend]


@contextmanager
def blocking_wait() -> Iterator[None]:
    """Make a ProcessGroupNCCL created inside report errors and timeouts only through its works.

    Otherwise NCCL's watchdog ends the whole process after a timeout or a peer's death, so a dead engine would kill a
    trainer rank.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _make_gloo(store: PrefixStore, place: MemberPlace) -> Backend:
    return cast("Backend", ProcessGroupGloo(store, place.rank, place.size, timeout=timedelta(seconds=place.connect_s)))


def _make_nccl(store: PrefixStore, place: MemberPlace) -> Backend:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    # NCCL's operations use the timeout of their group, whatever a single call requests.
    options._timeout = timedelta(seconds=place.operation_s)
    with blocking_wait():
        return cast("Backend", ProcessGroupNCCL(store, place.rank, place.size, options))


class _WithoutAbort:
    """A gloo group, whose operations end on their own."""

    def __init__(self, group: Backend) -> None:
        self.broadcast, self.shutdown = group.broadcast, group.shutdown

    def abort(self) -> None:
        """Do nothing: `Group` keeps the group."""


def _relay(
    make: Callable[[PrefixStore, MemberPlace], Backend], *, cuda: bool
) -> Callable[[PrefixStore, MemberPlace], Backend]:
    """Return what connects one member of a relay. `make`: connects a trainer rank with the others."""

    def connect(store: PrefixStore, place: MemberPlace) -> Backend:
        def inner() -> Backend:
            group = make(PrefixStore("trainers", store), replace(place, size=place.senders))
            return group if cuda else _WithoutAbort(group)

        device = relay.device_of(torch.cuda.current_device() if cuda else -1)
        return cast("Backend", relay.join(place, device, inner if place.senders > 1 else None))

    return connect


BACKENDS = {
    "gloo": BackendKind("cpu", on_streams=False, make=_make_gloo),
    "nccl": BackendKind("cuda", on_streams=True, make=_make_nccl),
    # Polling drives a relay, just as it observes an operation on a stream.
    "relay": BackendKind("cpu", on_streams=True, make=_relay(_make_gloo, cuda=False)),
    "relay_cuda": BackendKind("cuda", on_streams=True, make=_relay(_make_nccl, cuda=True)),
}
