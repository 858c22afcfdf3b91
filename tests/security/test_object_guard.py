"""torch's object collectives, which Megatron-Core calls: what a stranger sends into a socket of gloo is not run."""

import io
import pickle
import re
import traceback
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from megarl.common.trust.object_guard import GuardedUnpickler, guard_object_collectives
from tests.support.attacks.attack import attack
from tests.support.worlds.world import World


def received(content: bytes) -> Any:
    """The object that torch makes of bytes from a socket."""
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return distributed_c10d._tensor_to_object(tensor, len(content), None)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)  # undone after the test
    monkeypatch.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    guard_object_collectives()


def test_torch_runs_what_it_receives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    received(attack(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()


def test_a_rank_does_not(tmp_path: Path, guarded: None) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"holds posix\.mkdir, which is no part of a checkpoint plan"):
        received(attack(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


class _Storage:
    """A pickle of a tensor's storage whose inner pickle is an attack."""

    def __init__(self, inner: bytes) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return torch.storage._load_from_bytes, (self.inner,)


@pytest.fixture
def own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own loader of storages (torch 2.13), which Megatron-Core replaces where it is imported."""

    def _load_from_bytes(content: bytes) -> object:
        return torch.load(io.BytesIO(content), weights_only=False)

    _load_from_bytes.__module__, _load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
    monkeypatch.setattr(torch.storage, "_load_from_bytes", _load_from_bytes)


def test_nor_what_is_hidden_in_a_tensor(
    tmp_path: Path, guarded: None, own_loader: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    torch.save({"x": _Attack(tmp_path / "ran")}, buffer)
    content = pickle.dumps(_Storage(buffer.getvalue()))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        received(content)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    received(content)
    assert (tmp_path / "ran").exists(), "torch's own function runs it"


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")],
)
def test_a_storage_is_read_restricted_under_each_name(module: str, name: str, tmp_path: Path, own_loader: None) -> None:
    """Megatron-Core replaces torch's function by its own, whose name is then sent."""
    load = GuardedUnpickler(io.BytesIO()).find_class(module, name)
    harmless, crafted = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(3.0).untyped_storage(), harmless)
    torch.save({"x": _Attack(tmp_path / "ran")}, crafted)
    assert bytes(load(harmless.getvalue())) == torch.arange(3.0).numpy().tobytes()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(crafted.getvalue())
    assert not (tmp_path / "ran").exists()
    torch.storage._load_from_bytes(crafted.getvalue())
    assert (tmp_path / "ran").exists(), "torch's own function runs it"


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["os.system", "Size.__class__", "nn.Module", "load"])
def test_no_dotted_and_no_further_names(name: str, guarded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = b"".join(b"\x8c" + bytes([len(word)]) + word for word in (b"torch", name.encode()))
    content = b"\x80\x04" + words + b"\x93."
    with pytest.raises(pickle.UnpicklingError, match="is no part of a checkpoint plan"):
        received(content)
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    assert received(content) is attrgetter(name)(torch), "torch hands it out"


def test_plans_and_tensors_arrive(guarded: None) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    shard = ShardedTensor.from_rank_offsets("weight", tensor, (0, 0, 1)).without_data()
    plan = SavePlan([], MetadataIndex("a", torch.Size([1])), (1,))
    found = received(pickle.dumps([tensor, shard, plan, {"a": (1, None, 0.5)}]))
    assert torch.equal(found[0], tensor) and found[1] == shard and found[2] == plan


def sent(value: object) -> bytes:
    """The bytes that torch sends for an object."""
    tensor, _ = distributed_c10d._object_to_tensor(value, torch.device("cpu"), None)
    return bytes(tensor.numpy().tobytes())


class _OwnError(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("the file is damaged"), "ValueError: the file is damaged"),
        (KeyError("w"), "KeyError: 'w'"),
        (_OwnError("a", "b"), f"{__name__}._OwnError: a and b"),
        (RuntimeError("a worker failed"), "a worker failed"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_the_failure_of_a_rank_arrives_as_text(error: BaseException, text: str, guarded: None) -> None:
    try:
        raise error
    except BaseException as raised:
        wrapped = _wrap_exception(raised)
    found, trace = received(sent(wrapped))
    assert type(found) is RuntimeError and str(found) == text and list(trace) == []
    summary = received(sent(CheckpointException("plan", {3: wrapped})))
    assert type(summary) is CheckpointException and str(summary.failures[3][0]) == text
    assert str(CheckpointException("plan", {3: (found, trace)})) == str(summary)


def test_no_other_exceptions_and_no_frames_of_a_traceback(
    tmp_path: Path, guarded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame reads a line of the file that it names when somebody prints it."""
    (tmp_path / "secret").write_text("key of this host\n")
    contents = {
        "builtins.ValueError": pickle.dumps(ValueError("x")),
        "traceback.FrameSummary": pickle.dumps(
            traceback.StackSummary([traceback.FrameSummary(str(tmp_path / "secret"), 1, "f", lookup_line=False)])
        ),
    }
    for name, content in contents.items():
        with pytest.raises(pickle.UnpicklingError, match=f"holds {re.escape(name)}"):
            received(content)
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    error, frames = (received(content) for content in contents.values())
    assert type(error) is ValueError and "key of this host" in "".join(frames.format()), "torch makes them"


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_learns_which_rank_failed_and_why(ranks: int, world: Callable[[int], World]) -> None:
    """In each way in which torch plans a save or a load."""
    answers = world(ranks).run("tests.support.ranks.checkpoints.crafted:fail_to_plan", timeout=30.0)
    cause = f"(RANK {ranks - 1})\nRuntimeError: ValueError: rank {ranks - 1} cannot plan"
    assert len(answers) == ranks
    for step, *messages in zip(("reduce_scatter", "all_reduce", "all_gather"), *answers, strict=True):
        assert all(cause in message for message in messages), (step, messages)
