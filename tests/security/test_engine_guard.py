"""The object collectives between an engine's workers: a stranger in a socket of gloo runs nothing, nor by a queue."""

import ctypes
import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

from megarl.weights.receive.engine_guard import EngineUnpickler
from tests.support.attacks.attack import attack


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MessageQueue:
    """A queue from this process, the first worker, to another one on this host."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/tmp")
    return MessageQueue(n_reader=1, n_local_reader=1, local_reader_ranks=[1])


def received(content: bytes) -> Any:
    """The object that a worker makes of bytes from a socket."""
    return EngineUnpickler(io.BytesIO(content)).load()


def test_a_worker_does_not_run_what_it_receives(tmp_path: Path) -> None:
    content = attack(tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError, match=r"holds posix\.mkdir, which is no part of what an engine's work"):
        received(content)
    assert not (tmp_path / "ran").exists()
    pickle.loads(content)  # what torch does without the guard
    assert (tmp_path / "ran").exists()


def test_what_workers_exchange_arrives(queue: MessageQueue) -> None:
    """Names and numbers, handles of a GPU's memory, and the queue, which its reader can open."""
    values: list[Any] = ["psm_1", ("cache", 3), [[1, 2], None], b"handle", True, ("{}", 7), [None, False]]
    values.append(torch.arange(64, dtype=torch.uint8))
    *plain, tensor = received(pickle.dumps(values))
    assert plain == values[:-1] and torch.equal(tensor, torch.arange(64, dtype=torch.uint8))
    handle = received(pickle.dumps(queue.export_handle()))
    assert isinstance(handle, Handle) and vars(handle) == vars(queue.export_handle())
    reader = MessageQueue.create_from_handle(handle, 1)
    queue.enqueue({"run": "step"})
    assert reader.dequeue(timeout=10) == {"run": "step"}


def test_handles_of_flashinfer_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is not installed without a GPU: the class is written as it writes it."""
    module = ModuleType("flashinfer.comm.cuda_ipc")
    fields = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": module.__name__}
    kind: Any = type("cudaIpcMemHandle_t", (ctypes.Structure,), fields)
    monkeypatch.setattr(module, kind.__name__, kind, raising=False)
    for name in ("flashinfer", "flashinfer.comm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    content = bytes(range(128))
    assert bytes(received(pickle.dumps(kind.from_buffer_copy(content)))) == content


def test_a_queue_of_a_stranger_would_run_code(tmp_path: Path, queue: MessageQueue) -> None:
    """Whoever can write into the memory of a queue: its readers unpickle it."""
    handle = queue.export_handle()
    reader = MessageQueue.create_from_handle(handle, 1)
    content = attack(tmp_path / "ran")
    with queue.acquire_write(timeout=10) as memory:
        memory[: 3 + 4 + len(content)] = b"\0" + (1).to_bytes(2, "big") + len(content).to_bytes(4, "big") + content
    reader.dequeue(timeout=10)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "forged",
    [
        {"local_subscribe_addr": "tcp://10.0.0.9:5555"},
        {"local_notify_addr": "tcp://127.0.0.1:5555"},
        {"local_subscribe_addr": "ipc:///tmp/not-there"},
        {"local_subscribe_addr": "ipc:///tmp/../tmp/x"},
        {"local_subscribe_addr": "ipc:///etc/hostname"},
        {"remote_subscribe_addr": "tcp://10.0.0.9:5555", "local_reader_ranks": []},
        {"buffer_handle": (1, 1024, 10, "not_there")},
        {"buffer_handle": (1, 1024, 10, "../../tmp/x")},
        {"buffer_handle": "psm_1"},
        {"tensor_arena_handle": (1, 1024, 10, "not_there")},
    ],
)
def test_a_queue_elsewhere_is_refused(forged: dict[str, Any], queue: MessageQueue) -> None:
    handle = Handle(**{**vars(queue.export_handle()), **forged})
    assert vars(pickle.loads(pickle.dumps(handle))) == vars(handle)
    with pytest.raises(pickle.UnpicklingError, match="names a queue of another user or host"):
        received(pickle.dumps(handle))


def test_nor_is_a_queue_of_another_user(queue: MessageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = pickle.dumps(queue.export_handle())
    received(handle)
    monkeypatch.setattr("os.getuid", lambda: 65534)
    assert vars(pickle.loads(handle)) == vars(queue.export_handle()), "torch itself takes it"
    with pytest.raises(pickle.UnpicklingError, match="of another user or host"):
        received(handle)


def test_nor_one_that_is_made_from_arguments() -> None:
    class Call:
        def __reduce__(self) -> tuple[type, tuple[list[int], None, str]]:
            return Handle, ([1], None, "tcp://10.0.0.9:5555")

    made = pickle.loads(pickle.dumps(Call()))
    assert made.local_subscribe_addr == "tcp://10.0.0.9:5555", "torch itself makes it"
    with pytest.raises(pickle.UnpicklingError, match="made from arguments"):
        received(pickle.dumps(Call()))
