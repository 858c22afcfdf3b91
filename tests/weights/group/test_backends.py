"""The group of an accelerator is made as it must be, without an accelerator."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.common.errors import PeerTimeout
from megarl.weights.group import backends
from megarl.weights.group.backends import BACKENDS, BackendKind, blocking_wait
from megarl.weights.group.relay import MemberPlace
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, await_members
from tests.support.waiting import wait_until


def test_nccl_is_made_without_a_watchdog_that_ends_the_process_and_with_the_syncs_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []

    class Options:
        _timeout: Any = None

    class RecordingGroup:
        def __init__(self, *args: Any) -> None:
            made.append((*args, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")))

    RecordingGroup.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordingGroup, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    BACKENDS["nccl"].make(SimpleNamespace(), MemberPlace("m", 1, 3, connect_s=5.0, operation_s=605.0))  # type: ignore[arg-type]
    ((_, rank, size, options, blocking),) = made
    assert (rank, size, options._timeout.total_seconds(), blocking) == (1, 3, 605.0, "1")
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "other groups of the process keep their watchdog"


def test_the_variable_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with pytest.raises(ValueError), blocking_wait():
        raise ValueError
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


class NeverConnects:
    """Waits as ncclCommInitRank does when a member has died after it said that it was ready."""

    def __init__(self) -> None:
        self.aborted = self.shut_down = False

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Any:
        time.sleep(300.0)

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        self.shut_down = True


def group_of_one(monkeypatch: pytest.MonkeyPatch, backend: Any) -> Group:
    monkeypatch.setitem(backends.BACKENDS, "test", BackendKind("cpu", on_streams=True, make=lambda *_: backend))
    return Group(SyncStore("127.0.0.1", 0, server=True), GroupMembers(0, (0,), (), (), "test", 60.0), 0)


def test_a_communicator_that_is_never_made_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NeverConnects()
    group = group_of_one(monkeypatch, backend)
    monkeypatch.setattr("megarl.weights.group.transport.OPERATION_SLACK_S", 0.0)
    leader = threading.Thread(target=await_members, args=(group.store.connection(), group.members, 60.0))
    leader.start()
    with pytest.raises(PeerTimeout, match=r"trainer rank 0 waited .* to connect the weight-sync group"):
        group.join(2.0)
    leader.join(60.0)
    assert not leader.is_alive()


def test_a_backend_that_is_made_after_the_deadline_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, go_on = NeverConnects(), threading.Event()

    def make(*_: Any) -> NeverConnects:
        go_on.wait(300.0)
        return backend

    group = group_of_one(monkeypatch, backend)
    monkeypatch.setattr(group, "_make_backend", make)
    group.enter("connect", 0.5)
    with pytest.raises(PeerTimeout):
        group._connect(0.5)
    group.abort()
    assert not backend.aborted
    go_on.set()
    wait_until(lambda: backend.aborted, 60.0, "the abort")
    assert group._backend is None


def test_a_group_on_streams_is_closed_by_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orderly shutdown waits for all members, of which some may have aborted."""
    backend = NeverConnects()
    group = group_of_one(monkeypatch, backend)
    group._backend = backend
    group.close()
    assert backend.aborted and not backend.shut_down
