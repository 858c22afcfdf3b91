"""A way of sending that is right on gloo and hangs on streams: one thread gathers, another one broadcasts.

Both issue on the rank's default stream, in no common order. It shows that the simulation sees the circle of waits that
`megarl/weights/send/sync_attempt.py` describes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.weights.group.transport import POLL_S, Group
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import Bucket
from megarl.weights.plan.operation_order import LEAST_BUFFERS, Order
from tests.support.streams.simulated_streams import WAIT_S, Device, on

LIMIT_S = 2 * WAIT_S  # every wait of the thread on the simulated device has ended by then


class TwoThreadSending:
    """Has the interface of `SyncAttempt`. After a gather's operations the default stream, not the host, waits for
    them."""

    @classmethod
    def on(cls, device: Device) -> Callable[..., TwoThreadSending]:
        return lambda *args: cls(device, *args)

    def __init__(
        self,
        device: Device,
        group: Group,
        order: Order,
        gathers: Sequence[Any],
        packer: BucketPacker | None,
        rank: int,
        version: int,
    ) -> None:
        self._device, self._group, self._gathers = device, group, gathers
        self._buckets = [each.bucket for each in order if each.kind == "broadcast"]
        self._packer, self._rank, self._version = packer, rank, version
        self._free: queue.Queue[None] = queue.Queue()
        for _ in range(LEAST_BUFFERS):
            self._free.put(None)
        self._packed: queue.Queue[Bucket] = queue.Queue()
        self._failure: list[BaseException] = []
        self.digests: dict[int, int] = {}
        self.staged = threading.Event()
        self.staged.set()  # it stages nothing: the engines are paused at once

    @torch.no_grad()
    def run(self) -> None:
        thread = threading.Thread(target=self._broadcast_all, daemon=True)
        if self._packer is not None:
            thread.start()
        try:
            for bucket in self._buckets:
                self._gather(bucket)
            if self._packer is not None:
                thread.join(LIMIT_S)
                assert not thread.is_alive(), f"trainer rank {self._rank} still broadcasts after {LIMIT_S:.0f} s"
                self._raise()
                report = {"member": self._group.name, "failure": None, "digests": self.digests}
                self._group.store.put(self._group.key("report", self._group.rank), report)
        except BaseException as error:
            report = {"member": self._group.name, "failure": str(error), "secondary": True}
            self._group.store.put(self._group.key("report", self._group.rank), report)
            self._group.post_abort(str(error))
            self._group.abort()
            raise

    def finish_gathers(self, timeout_s: float) -> None:
        """Those that are left cannot end."""

    def _gather(self, bucket: Bucket) -> None:
        gather = self._gathers[bucket.index]
        if gather is None:
            return
        if gather.owned:
            self._await(self._free, "a free buffer")
        gather.copy()
        gather.post()
        for work, _ in gather._works:
            work.wait()  # the stream waits
        gather._works = []
        gather.finish()
        if gather.owned:
            assert self._packer is not None
            self.digests[bucket.index] = self._packer.seal(bucket, self._version)
            self._packed.put(bucket)

    def _broadcast_all(self) -> None:
        try:
            with on(self._device), torch.no_grad():
                for bucket in self._buckets:
                    self._broadcast(bucket)
        except BaseException as error:
            self._failure.append(error)

    def _broadcast(self, bucket: Bucket) -> None:
        assert self._packer is not None
        mine = bucket.owner == self._rank
        if mine:
            self._await(self._packed, "a packed bucket")
        wire_B = self._packer.wire(bucket) if mine else self._packer.scratch_B[: bucket.wire_bytes]
        self._group.broadcast(wire_B, self._group.members.senders.index(bucket.owner), bucket.index).wait()
        if mine:
            self._free.put(None)

    def _await(self, items: queue.Queue[Any], what: str) -> None:
        while True:
            try:
                items.get(timeout=POLL_S)
                return
            except queue.Empty:
                self._raise()
                self._group.check(what)

    def _raise(self) -> None:
        if self._failure:
            raise self._failure[0]
