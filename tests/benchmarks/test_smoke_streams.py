"""The step `streams` of gpu_smoke on simulated devices: some order work as CUDA and NCCL do, others do not."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.weights.sending import Sending
from tests.support.checkout import ROOT
from tests.support.simulated_nccl import SimulatedNCCL, SimulatedWork
from tests.support.smoke_streams import SimulatedStreams

PREMISE, OWN_STREAM, TIMEOUT, ABORT, SOON, BYTES, DEADLINE = range(7)


@pytest.fixture(scope="module")
def streams() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    module = importlib.import_module("smoke.streams")
    module.OCCUPIED_S = 0.3
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))


class Unordered(SimulatedStreams):
    """Its threads issue on streams of their own, so nothing waits for the pending work."""

    def stream(self, *, own: bool) -> AbstractContextManager[None]:
        return super().stream(own=True)


class SlowAbort(SimulatedNCCL):
    def abort(self) -> None:
        time.sleep(2.5)


def failed_rows(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Call a function that measures; return the numbers of its rows whose bounds do not hold."""
    device: SimulatedStreams = next(each for each in arguments if isinstance(each, SimulatedStreams))
    with closing(device):
        rows = function(*arguments)
    return [number for number, row in enumerate(rows) if not row.ok]


def all_failed_rows(streams: ModuleType, device: SimulatedStreams) -> list[int]:
    def run(device: SimulatedStreams) -> Any:
        rows, left_out = streams.run(tiny(), device)
        assert not left_out and len(rows) == 7
        return rows

    return failed_rows(run, device)


def tiny() -> Any:
    return sys.modules["smoke.rows"].Where(torch.device("cpu"), True)


def test_a_device_that_orders_by_streams(streams: ModuleType) -> None:
    assert all_failed_rows(streams, SimulatedStreams()) == []


@pytest.mark.slow
def test_one_hardware_queue_fails_the_broadcast_on_its_own_stream_only(streams: ModuleType) -> None:
    """The weight sync itself is right with one hardware queue too."""
    assert all_failed_rows(streams, SimulatedStreams(single_queue=True)) == [OWN_STREAM]


def test_a_device_without_the_premise_fails(streams: ModuleType) -> None:
    """No wait of such a device lasts until the pending work ends, so none runs into a timeout or a deadline."""
    assert all_failed_rows(streams, Unordered()) == [PREMISE, TIMEOUT, DEADLINE]


@pytest.mark.slow
def test_an_abort_that_takes_longer_than_the_timeout_fails(streams: ModuleType) -> None:
    with patch("tests.support.smoke_streams.SimulatedNCCL", SlowAbort):
        assert failed_rows(streams.blocking_rows, SimulatedStreams()) == [ABORT - TIMEOUT]


def test_a_publish_on_a_stream_of_its_own_carries_old_weights(streams: ModuleType) -> None:
    device = SimulatedStreams()

    class Beside(Sending):
        def run(self) -> None:
            with device.stream(own=True):
                super().run()

    with patch.object(streams.publish, "Sending", Beside):
        assert failed_rows(streams.publish.rows, tiny(), device, streams.OCCUPIED_S) == [BYTES - SOON]


@pytest.mark.slow
def test_a_publish_that_waits_for_more_than_the_pending_work_fails(streams: ModuleType) -> None:
    """It waits in this way if another thread keeps issuing work on the default stream."""
    device = SimulatedStreams()

    class Behind(Sending):
        def run(self) -> None:
            if self._version == 2:
                device.occupy(8 * streams.OCCUPIED_S)
            super().run()

    with patch.object(streams.publish, "Sending", Behind):
        assert failed_rows(streams.publish.rows, tiny(), device, streams.OCCUPIED_S) == [SOON - SOON]


def test_a_wait_that_blocks_the_host_misses_the_deadline(streams: ModuleType) -> None:
    """Here `is_completed` returns only when the work has ended, as a blocking wait would."""

    def blocks(work: Any) -> bool:
        return bool(work._done.wait(60.0))

    with patch.object(SimulatedWork, "is_completed", blocks):
        failed = failed_rows(streams.publish.rows, tiny(), SimulatedStreams(), streams.OCCUPIED_S)
    assert failed == [DEADLINE - SOON]
