"""Repeated copies do what the loaders did; where nothing can be repeated, the loaders run every time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.receive.coverage import LoadCoverage
from megarl.weights.receive.recorded_copies import NamedTensors, RecordedCopies


class Model(torch.nn.Module):
    """Weights of several names in fused tensors, loaded as vLLM's loaders do for the second of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.experts = torch.nn.Parameter(torch.zeros(3, 2, 4), requires_grad=False)
        self.padded = torch.nn.Parameter(torch.full((5, 2), 7.0, dtype=torch.float64), requires_grad=False)
        self.loads = 0
        self.kept: list[torch.Tensor] = []
        self.extra: Callable[[str, torch.Tensor], None] = lambda name, tensor: None

    def load(self, tensors: NamedTensors) -> None:
        self.loads += 1
        for name, tensor in tensors:
            self.extra(name, tensor)
            if name == "up":  # a part of the rows, in the other half of the fused tensor
                self.fused.data.narrow(0, 3, 3).copy_(tensor.narrow(0, 3, 3))
            elif name == "gate":
                self.fused.data[:3] = tensor.chunk(2)[1]
            elif name.startswith("expert"):  # a part of the columns: the source is not contiguous
                self.experts.data[int(name[-1])].copy_(tensor.narrow(1, 4, 4))
            elif name == "padded":
                self.padded[:3].data.copy_(tensor)
                self.padded[3:].data.fill_(0)

    def content(self) -> list[torch.Tensor]:
        return [parameter.clone() for parameter in self.parameters()]


SHAPES = {"up": (6, 4), "gate": (6, 4), "expert0": (2, 8), "expert1": (2, 8), "expert2": (2, 8), "padded": (3, 2)}


def received(seed: int, names: list[str] | None = None) -> list[tuple[str, torch.Tensor]]:
    """Views of one buffer, as they arrive."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(sum(torch.Size(shape).numel() for shape in SHAPES.values()), generator=generator)
    parts = flat.split([torch.Size(shape).numel() for shape in SHAPES.values()])
    views = {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}
    return [(name, views[name]) for name in names or SHAPES]


def sync(copies: RecordedCopies, model: Model, seed: int, cut: int = 3, names: list[str] | None = None) -> None:
    tensors = received(seed, names)
    copies.start(model)
    copies.load(tensors[:cut])
    copies.load(tensors[cut:])
    copies.finish()


def test_later_syncs_call_no_loader_and_give_the_same() -> None:
    model, plain = Model(), Model()
    copies = RecordedCopies(model.load)
    for seed in range(4):
        sync(copies, model, seed)
        plain.load(received(seed))
        assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))
        assert copies.repeated == (seed > 0) and model.loads == 2


@settings(max_examples=50, deadline=None)
@given(st.permutations(list(SHAPES)), st.permutations(list(SHAPES)), st.integers(0, 6), st.integers(0, 6))
def test_order_and_buckets_do_not_matter(first: list[str], second: list[str], cut: int, other: int) -> None:
    model, plain = Model(), Model()
    copies = RecordedCopies(model.load)
    sync(copies, model, 0, cut, first)
    sync(copies, model, 1, other, second)
    plain.load(received(1))
    assert copies.repeated
    assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))


def computes(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "gate":
        tensor * 2.0


def looks_at_values(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "gate":
        tensor[0, 0].item()


def keeps(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "gate":
        model.kept.append(tensor[:1])


def overwrites(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "expert0":  # "up" was loaded before
        model.fused.data[5].zero_()


def loads_into_one_place(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "expert0":
        model.experts.data[1].copy_(tensor.narrow(1, 0, 4))


def converts(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "gate":
        model.fused.data[:3] += 1.0


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (computes, "computes aten.mul"),
        (looks_at_values, "computes aten._local_scalar_dense"),
        (keeps, "keeps a received tensor"),
        (overwrites, "overwrites a received tensor with a constant"),
        (loads_into_one_place, "two tensors are loaded into the same place"),
        (converts, "changes tensors by aten.add_"),
    ],
)
def test_loaders_that_do_more_than_copy_run_every_time(
    extra: Callable[[Model, str, torch.Tensor], None], reason: str
) -> None:
    model, plain = Model(), Model()
    model.extra = lambda name, tensor: extra(model, name, tensor)
    plain.extra = lambda name, tensor: extra(plain, name, tensor)
    copies = RecordedCopies(model.load)
    for seed in range(3):
        sync(copies, model, seed)
        plain.load(received(seed))
        assert reason in str(copies.obstacle) and not copies.repeated
        assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))
    assert model.loads == 6


class NotedWrites(LoadCoverage):
    """Keeps the addresses of the tensors that were written."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def note(self, func: Any, args: Any) -> None:
        if func._schema.is_mutable:
            self.addresses.append(args[0].data_ptr())


@pytest.mark.parametrize("extra", [None, computes])
def test_every_write_is_counted_once_while_copies_are_recorded_or_refused(
    extra: Callable[[Model, str, torch.Tensor], None] | None,
) -> None:
    """One tensor is refused in the first bucket, so that the loaders run alone for the second one."""
    model, coverage = Model(), NotedWrites()
    if extra is not None:
        model.extra = lambda name, tensor: extra(model, name, tensor)
    copies = RecordedCopies(model.load)
    copies.start(model)
    tensors = received(0)
    copies.load(tensors[:3], coverage)
    assert (copies.obstacle is None) == (extra is None)
    copies.load(tensors[3:], coverage)
    fused, experts, padded = model.parameters()
    starts = [fused[3], fused[0], *experts, padded[0], padded[3]]
    assert coverage.addresses == [each.data_ptr() for each in starts]


def test_weights_that_moved_are_recorded_again() -> None:
    """The engine may have replaced a weight since; a copy into the old one would be lost without an error."""
    model, plain = Model(), Model()
    copies = RecordedCopies(model.load)
    sync(copies, model, 0)
    model.fused = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    sync(copies, model, 1)
    assert not copies.repeated
    sync(copies, model, 2)
    plain.load(received(2))
    assert copies.repeated and model.loads == 4
    assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))


def test_other_tensors_are_loaded_and_recorded_again() -> None:
    model, plain = Model(), Model()
    copies = RecordedCopies(model.load)
    sync(copies, model, 0, names=["up", "gate"])
    for seed, repeated in ((1, False), (2, False), (3, True)):  # 1: new names; 2: recorded; 3: repeated
        sync(copies, model, seed, cut=2)
        plain.load(received(seed))
        assert copies.repeated == repeated
        assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))
    copies.start(model)
    copies.load([("gate", torch.ones(6, 4, dtype=torch.float64))])
    copies.finish()
    assert not copies.repeated and torch.equal(model.fused[:3], torch.ones(3, 4))


def test_a_sync_of_some_tensors_leaves_the_others_alone() -> None:
    """As those that leave out what never changes."""
    model, plain = Model(), Model()
    copies = RecordedCopies(model.load)
    for seed, names in ((0, None), (1, ["up", "expert1"]), (2, ["up", "expert1"]), (3, None)):
        sync(copies, model, seed, names=names)
        plain.load(received(seed, names))
        assert copies.repeated == (seed > 0) and model.loads == 2
        assert all(torch.equal(a, b) for a, b in zip(model.content(), plain.content(), strict=True))


def test_a_sync_that_broke_off_is_recorded_again() -> None:
    model = Model()
    copies = RecordedCopies(model.load)
    copies.start(model)
    copies.load(received(0, ["up"]))
    for seed, repeated in ((1, False), (2, True)):
        sync(copies, model, seed)
        assert copies.repeated == repeated and copies.obstacle is None
