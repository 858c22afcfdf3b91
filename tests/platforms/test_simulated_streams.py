"""The simulation of CUDA's streams shows what they do: order, waits of streams, and programs that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.streams.simulated_streams import Device, on
from tests.support.worlds.world import World

RUN = "tests.support.ranks.sync.stream_programs:run"


@pytest.mark.parametrize("single_queue", [False, True])
def test_operations_are_done_in_order_and_later(single_queue: bool) -> None:
    device = Device(single_queue=single_queue)
    with on(device):
        tensor = torch.zeros(4)
        opened = threading.Event()
        device.default.wait(opened)
        tensor.add_(1.0)
        view = tensor[1:3].view(2, 1)
        doubled = (view * 2).sum()
        torch._foreach_copy_([tensor[:1]], [torch.full((1,), 9.0)])
    assert tensor.tolist() == [0.0] * 4, "the host is ahead of the stream"
    opened.set()
    with on(device):
        assert doubled.item() == 4.0
    device.synchronize()
    assert tensor.tolist() == [9.0, 1.0, 1.0, 1.0]
    device.close()


def test_a_failure_on_the_device_is_raised_where_the_host_waits() -> None:
    device = Device()
    device.default.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    device.close()


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(
    ("program", "single_queue", "result"),
    [
        ("unordered_groups", False, "done"),  # each communicator has a stream of its own
        ("unordered_groups", True, "stuck"),  # the false dependency of one hardware queue
        ("unordered_waits", False, "stuck"),
        ("unordered_waits", True, "stuck"),
        ("ordered_waits", False, "done"),
        ("ordered_waits", True, "done"),
    ],
)
def test_programs_without_a_common_order_hang(
    world: Callable[[int], World], program: str, single_queue: bool, result: str
) -> None:
    wait_s = 3.0 if result == "stuck" else 20.0
    assert world(2).run(RUN, program=program, single_queue=single_queue, host_wait_s=wait_s) == [result] * 2
