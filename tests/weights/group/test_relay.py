"""The relay between trainer ranks and the workers on their devices, with threads for processes."""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from torch.distributed import BroadcastOptions, HashStore, ProcessGroupGloo

from megarl.weights.group import relay
from megarl.weights.group.relay import MemberPlace, TrainerEnd, WorkerEnd


@dataclass
class Keys:
    """The store's part, in this process."""

    values: dict[str, Any] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, key: str, value: object) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def block_all(self, keys: Sequence[str], timeout_s: float) -> list[Any] | None:
        with self.changed:
            if not self.changed.wait_for(lambda: set(keys) <= self.values.keys(), timeout_s):
                return None
            return [self.values[key] for key in keys]


Members = list[Any]


def joined(senders: int, workers: int, device: Callable[[int], str] = lambda rank: "") -> Members:
    keys: Any = Keys()
    store, size = HashStore(), senders + workers

    def join(rank: int) -> TrainerEnd | WorkerEnd:
        place = MemberPlace(f"member {rank}", rank, size, 20.0, 0.0, senders, keys)
        inner: Any = None if senders == 1 else lambda: ProcessGroupGloo(store, rank, senders)
        return relay.join(place, device(rank), inner)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size)))


def from_rank(root: int) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options


@pytest.mark.parametrize(("senders", "workers"), [(1, 1), (2, 2), (2, 1), (2, 3), (1, 2)])
def test_every_worker_gets_what_a_trainer_rank_broadcasts(senders: int, workers: int) -> None:
    """Of any size and dtype; the buffers of the relay grow, and are used again and again."""
    members = joined(senders, workers)
    sent = [torch.arange(size) + number for number, size in enumerate((3, 10, 1, 700, 20, 20, 5000, 1))]

    def run(rank: int) -> list[torch.Tensor]:
        got = []
        for number, content in enumerate(sent):
            root = number % senders
            tensor = content.clone() if rank == root else torch.zeros_like(content)
            members[rank].broadcast([tensor], from_rank(root)).wait()
            got.append(tensor.clone())
            tensor.fill_(-1)  # it is free
        return got

    with ThreadPoolExecutor(len(members)) as pool:
        for got in pool.map(run, range(len(members))):
            assert all(map(torch.equal, got, sent))
    for each in members:
        each.shutdown()


def test_a_worker_that_is_slow_holds_its_rank_back_after_two_buffers_and_gets_all_of_them() -> None:
    trainer, worker = joined(1, 1)
    works = [trainer.broadcast([torch.full((4,), number)], from_rank(0)) for number in range(3)]
    works[1].wait()
    time.sleep(0.1)
    assert works[0].is_completed() and not works[2].is_completed()
    got = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]
    for tensor in got[:1]:
        worker.broadcast([tensor], from_rank(0)).wait()
    works[2].wait()
    for tensor in got[1:]:
        worker.broadcast([tensor], from_rank(0)).wait()
    assert [int(tensor[0]) for tensor in got] == [0, 1, 2]


def test_workers_are_served_by_the_rank_on_their_device() -> None:
    devices = {0: "a", 1: "b", 2: "b", 3: "a"}
    members = joined(2, 2, lambda rank: devices[rank])
    assert [len(each._channels) for each in members[:2]] == [1, 1]
    members[1]._inner = None
    members[1].broadcast([torch.tensor([7])], from_rank(1)).wait()
    got = torch.tensor([0])
    members[2].broadcast([got], from_rank(1)).wait()
    assert int(got) == 7, "the worker on the device of rank 1"


def test_a_worker_without_a_rank_on_its_device_is_named() -> None:
    devices = {0: "a", 1: "b"}
    with pytest.raises(RuntimeError, match=r"member 1 finds no trainer rank on its device: .*'device': 'b'"):
        joined(1, 1, lambda rank: devices[rank])


@pytest.mark.parametrize("dead", [0, 1])
def test_a_member_that_has_died_is_a_closed_connection(dead: int) -> None:
    members = joined(1, 1)
    members[dead].shutdown()
    works = [members[1 - dead].broadcast([torch.zeros(1)], from_rank(0)) for _ in range(3)]
    with pytest.raises(RuntimeError, match="connection"):
        for work in works:
            work.wait()


def test_a_message_of_another_size_is_refused() -> None:
    trainer, worker = joined(1, 1)
    trainer.broadcast([torch.zeros(3)], from_rank(0)).wait()
    with pytest.raises(RuntimeError, match="relayed 12 bytes, not 16"):
        worker.broadcast([torch.zeros(4)], from_rank(0)).wait()


def test_the_buffers_of_a_group_that_has_ended_are_used_again() -> None:
    """A GPU's memory that a killed worker has mapped is never free again."""
    used = set()
    relay._UNUSED.clear()
    for _ in range(3):
        trainer, worker = joined(1, 1)
        got = [torch.zeros(4, dtype=torch.int64) for _ in range(relay.BUFFERS)]
        works = [trainer.broadcast([torch.full((4,), number)], from_rank(0)) for number in range(relay.BUFFERS)]
        for work, tensor in zip(works, got, strict=True):
            work.wait()
            worker.broadcast([tensor], from_rank(0)).wait()
        assert [int(tensor[0]) for tensor in got] == [0, 1]
        used |= {each.content_B.data_ptr() for each in trainer._buffers}
        trainer.shutdown()
        while len(relay._UNUSED) < relay.BUFFERS:  # its thread ends
            time.sleep(0.01)
    assert len(used) == relay.BUFFERS


def test_a_member_that_is_alone_says_for_whom_it_waited() -> None:
    with pytest.raises(RuntimeError, match="member 0 waited 1 s for the members of the relay"):
        keys: Any = Keys()
        relay.join(MemberPlace("member 0", 0, 2, 1.0, 0.0, 1, keys), "", None)


def test_a_stranger_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=f"a process of user {own} has connected"):
        relay._own(left)
    right.close()


def test_a_stranger_who_connects_first_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, checked, refused = Keys(), relay._own, list[socket.socket]()

    def own(channel: socket.socket) -> socket.socket:
        if channel.getsockname() and not refused:  # the first one that the trainer accepts
            refused.append(channel)
            channel.close()
            raise PermissionError("a process of another user")
        return checked(channel)

    def join(rank: int) -> Any:
        place = MemberPlace(f"member {rank}", rank, 2, 20.0, 0.0, 1, cast(Any, keys))
        return relay.join(place, "", None)

    monkeypatch.setattr(relay, "_own", own)
    with ThreadPoolExecutor(2) as pool, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        trainer = pool.submit(join, 0)
        [offer] = keys.block_all(["/trainer/0"], 20.0) or []
        stranger.connect(f"\0{offer['socket']}")
        worker = pool.submit(join, 1)
        assert trainer.result(20) is not None and worker.result(20) is not None
        assert stranger.recv(64) == b"" and len(refused) == 1
