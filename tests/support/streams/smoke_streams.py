"""The streams of benchmarks/gpu_smoke.py on a CPU: simulated ones, with NCCL's order over gloo."""

import time
from contextlib import AbstractContextManager

import torch
from torch.distributed import HashStore, Store

from megarl.weights.group.backends import BACKENDS, BackendKind
from megarl.weights.group.relay import MemberPlace
from megarl.weights.plan.digest import digest
from tests.support.streams.simulated_nccl import SimulatedNCCL
from tests.support.streams.simulated_streams import Device, on


class SimulatedStreams:
    """Implements `smoke.streams.Streams`."""

    backend = "simulated streams"

    def __init__(self, *, single_queue: bool = False) -> None:
        # Its constants, which are kept per process, belong to no device.
        digest(torch.zeros(8, dtype=torch.uint8), version=0, bucket=0)
        self.device = Device(single_queue=single_queue)

        def make(store: Store, place: MemberPlace) -> SimulatedNCCL:
            return SimulatedNCCL(store, place.rank, place.size, self.device)

        BACKENDS[self.backend] = BackendKind("cpu", on_streams=True, make=make)

    def occupy(self, seconds: float) -> None:
        self.device.default.submit(lambda: time.sleep(seconds))

    def stream(self, *, own: bool) -> AbstractContextManager[None]:
        return on(self.device, self.device.new_stream() if own else None)

    def synchronize(self) -> None:
        self.device.synchronize()

    def group(self, *, timeout_s: float, blocking: bool) -> SimulatedNCCL:
        return SimulatedNCCL(HashStore(), 0, 1, self.device, blocking_s=timeout_s if blocking else None)

    def tensor(self) -> torch.Tensor:
        return torch.ones(1024)

    def close(self) -> None:
        """End the threads."""
        del BACKENDS[self.backend]
        self.device.close()
