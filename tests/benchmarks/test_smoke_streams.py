"""The step `streams` of gpu_smoke on devices made for the test: one orders work as CUDA and NCCL do, others do not."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.checkout import ROOT


@pytest.fixture(scope="module")
def streams() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    module = importlib.import_module("smoke.streams")
    module.OCCUPIED_S = 0.3
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))


class Work:
    def __init__(self, device: Device, start: float, timeout_s: float, blocking: bool) -> None:
        self.device, self.start, self.timeout_s, self.blocking = device, start, timeout_s, blocking

    def is_completed(self) -> bool:
        return time.monotonic() >= self.start

    def wait(self) -> None:
        """As NCCL: it blocks the caller only in blocking mode, and raises after the group's timeout."""
        if not self.blocking:
            return
        until = time.monotonic() + self.timeout_s
        while not self.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("Watchdog caught collective operation timeout")
            time.sleep(0.001)


class Device:
    """Streams as points in time until which they are busy. `one_queue`: all streams wait for the default one."""

    def __init__(self, *, one_queue: bool = False, ordered: bool = True, slow_abort: bool = False) -> None:
        self.one_queue, self.ordered, self.slow_abort = one_queue, ordered, slow_abort
        self.busy_until = 0.0
        self._on_default = threading.local()

    def occupy(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.monotonic()) + seconds

    @contextmanager
    def own(self) -> Iterator[None]:
        self._on_default.value = False
        yield
        self._on_default.value = True

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.busy_until - time.monotonic()))

    def group(self, *, timeout_s: float, blocking: bool) -> Any:
        device = self

        class Group:
            def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work:
                behind = device.ordered and (device.one_queue or getattr(device._on_default, "value", True))
                return Work(device, device.busy_until if behind else 0.0, timeout_s, blocking)

            def abort(self) -> None:
                time.sleep(4 * timeout_s if device.slow_abort else 0.0)

        return Group()

    def tensor(self) -> torch.Tensor:
        return torch.ones(1)


def verdicts(streams: ModuleType, device: Device) -> list[bool]:
    """One per row: premise, own stream, timeout, abort."""
    where = sys.modules["smoke.rows"].Where(torch.device("cpu"), True)
    rows, left_out = streams.run(where, device)
    assert not left_out
    return [row.ok for row in rows]


def test_a_device_that_orders_by_streams(streams: ModuleType) -> None:
    assert verdicts(streams, Device()) == [True, True, True, True]


def test_one_hardware_queue_fails_the_broadcast_on_its_own_stream(streams: ModuleType) -> None:
    assert verdicts(streams, Device(one_queue=True)) == [True, False, True, True]


def test_a_device_without_the_premise_fails(streams: ModuleType) -> None:
    """Nothing waits for anything, so nothing is proved either, and no wait runs into a timeout."""
    assert verdicts(streams, Device(ordered=False)) == [False, True, False, True]


def test_an_abort_that_takes_longer_than_the_timeout_fails(streams: ModuleType) -> None:
    assert verdicts(streams, Device(slow_abort=True)) == [True, True, True, False]
