"""The place of the reference model's weights, inside and outside a pass."""

from typing import Literal

import pytest
import torch

from megarl.trainer.reference_policy import Placement


class FakeDevice(Placement):
    """A copy in host memory stands for the GPU: other storage, the same values."""

    def _upload(self, home: torch.Tensor) -> torch.Tensor:
        return home.clone()


GPU = torch.device("cuda")


def module() -> torch.nn.Module:
    layer = torch.nn.BatchNorm1d(3)  # has parameters and buffers
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    return layer


def storages(layer: torch.nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())]


def test_offloaded_weights_are_on_the_device_only_inside_a_pass() -> None:
    layer = module()
    placement = FakeDevice([layer], GPU, "cpu_offload")
    assert placement.uploads
    home = storages(layer)
    for _ in range(2):
        with placement.resident():
            assert not set(storages(layer)) & set(home)
            assert layer.weight.tolist() == [1.0, 2.0, 3.0]
        assert storages(layer) == home
        assert layer.weight.tolist() == [1.0, 2.0, 3.0] and layer.running_var.tolist() == [1.0, 1.0, 1.0]


def test_they_go_home_even_when_the_pass_fails() -> None:
    layer = module()
    placement = FakeDevice([layer], GPU, "cpu_offload")
    home = storages(layer)
    with pytest.raises(RuntimeError), placement.resident():
        raise RuntimeError
    assert storages(layer) == home


@pytest.mark.parametrize(("device", "where"), [(GPU, "gpu"), (torch.device("cpu"), "cpu_offload")])
def test_otherwise_nothing_moves(device: torch.device, where: Literal["gpu", "cpu_offload"]) -> None:
    layer = module()
    placement = FakeDevice([layer], device, where)
    assert not placement.uploads
    before = storages(layer)
    with placement.resident():
        assert storages(layer) == before
