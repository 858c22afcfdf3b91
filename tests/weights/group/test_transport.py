"""A group that cannot be formed is aborted: a half-made one would block its process when it is destroyed."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megarl.common.errors import ConnectionLost, SyncAborted, WeightSyncError
from megarl.weights.group.backends import BACKENDS, BackendKind
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, await_members, end_forming

LIMIT_S = 30.0


class Pending:
    """A broadcast that never ends."""

    def is_completed(self) -> bool:
        return False


class FakeBackend:
    """Its broadcast fails, or never ends; `begun` is set when it begins."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.begun, self.aborts = fails, threading.Event(), 0

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Pending:
        self.begun.set()
        if self.fails:
            raise RuntimeError("connection reset by peer")
        return Pending()

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def server() -> SyncStore:
    return SyncStore("127.0.0.1", 0, server=True)


@pytest.fixture(params=[True, False], ids=["fails", "hangs"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBackend]:
    made = FakeBackend(request.param)
    monkeypatch.setitem(BACKENDS, "fake", BackendKind("cpu", on_streams=True, make=lambda store, place: made))
    yield made


def test_a_member_whose_connection_fails_or_hangs_aborts_what_it_made(server: SyncStore, backend: FakeBackend) -> None:
    members = GroupMembers(0, (0,), (), (), "fake", 60.0)
    group: Any = Group(server.connection(), members, 0)

    def lead() -> None:
        leader = server.connection()
        await_members(leader, members, LIMIT_S)
        if not backend.fails:
            backend.begun.wait(LIMIT_S)
            end_forming(leader, 0, "another member died")

    leading = threading.Thread(target=lead)
    leading.start()
    with pytest.raises(WeightSyncError) as raised:
        group.join(LIMIT_S)
    leading.join(LIMIT_S)
    if backend.fails:
        assert isinstance(raised.value, ConnectionLost) and "connection reset by peer" in str(raised.value)
    else:
        assert isinstance(raised.value, SyncAborted) and "another member died" in str(raised.value)
    assert backend.aborts == 1
    group.abort()  # as the sender does; once is enough
    assert backend.aborts == 1
    end_forming(server, 0, "the test is over")
    assert group.wait_end(LIMIT_S) is not None  # its watch has ended before the server does


def test_a_member_without_memory_has_lost_no_connection(server: SyncStore) -> None:
    """The failure is its own, so it is named as the cause and not as the effect of another one."""
    members = GroupMembers(0, (0,), (), (), "gloo", 60.0)
    group = Group(server.connection(), members, 0)
    group.fail(group.broken(torch.OutOfMemoryError("tried to allocate 64 MiB\nmore lines"), 2))
    answer = group.progress.answer()
    assert not answer.secondary
    assert re.search(r"had no memory in bucket 3 of .*: tried to allocate 64 MiB$", answer.failure or "")
