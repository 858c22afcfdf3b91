"""The store of a save's reports: a rank that cannot open it fails the save on every rank, and leaves none waiting."""

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save import checkpointer as module
from megarl.checkpoint.save import resume_point
from megarl.checkpoint.save.checkpointer import Checkpointer
from megarl.common.trust.run_secret import run_secret
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.weights.group.store import SyncStore
from tests.support.trainer.configs import config
from tests.support.trainer.thread_ranks import ThreadPeers, ThreadRanks

FAILING = ["secret of rank 0", "secret of rank 1", "address of rank 0", "server", "connection of rank 1"]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
    """Two ranks, whose collectives are those of threads."""
    made = ThreadRanks(replicas=2)

    def broadcast(value: Any, codec: Any, source: int, group: None) -> Any:
        return made.exchange(value)[source]

    monkeypatch.setattr(module, "broadcast", broadcast)
    monkeypatch.setattr(resume_point, "all_gather", lambda value, codec, group: made.exchange(value))
    return made


def checkpointer_of(rank: int, run_dir: Path) -> Checkpointer:
    made = Checkpointer.__new__(Checkpointer)
    made.config, made._rank, made._group, made._store = config("model", run__dir=str(run_dir)), rank, None, None  # type: ignore[assignment]
    return made


def fail_at(failing: str, ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one part of the opening fail on one rank."""

    def secret(run_dir: Path) -> bytes:
        if failing == f"secret of rank {ranks.dp_rank()}":
            raise PermissionError(failing)
        return run_secret(run_dir)

    def address(config: object) -> str:
        if failing == "address of rank 0":
            raise OSError(failing)
        return "127.0.0.1"

    def store(*arguments: Any, server: bool = False) -> SyncStore:
        if failing == ("server" if server else f"connection of rank {ranks.dp_rank()}"):
            raise OSError(failing)
        return SyncStore(*arguments, server=server)

    monkeypatch.setattr(module, "run_secret", secret)
    monkeypatch.setattr(module, "store_address", address)
    monkeypatch.setattr("megarl.weights.group.store.SyncStore", store)


@pytest.mark.parametrize("failing", FAILING)
def test_every_rank_learns_why_the_store_cannot_be_opened(
    tmp_path: Path, ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fail_at(failing, ranks, monkeypatch)
    results = ranks.run(lambda peers: checkpointer_of(peers.rank, tmp_path)._open_store())
    assert [store for store, _ in results] == [None, None]  # type: ignore[misc]
    first, second = (error for _, error in results)  # type: ignore[misc]
    assert first == second and f"rank {int(failing.endswith('1'))}: {failing}" in first


def test_a_later_save_opens_the_store_that_failed_and_then_keeps_it(
    tmp_path: Path, ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointers = [checkpointer_of(rank, tmp_path) for rank in range(2)]

    def open_store(peers: ThreadPeers) -> tuple[SyncStore | None, str]:
        return checkpointers[peers.rank]._open_store()

    with monkeypatch.context() as patched:
        fail_at("secret of rank 1", ranks, patched)
        ranks.run(open_store)
    opened, again = ranks.run(open_store), ranks.run(open_store)
    stores = [store for store, _ in opened]  # type: ignore[misc]
    assert stores == [store for store, _ in again] and None not in stores  # type: ignore[misc]
    stores[1].put("a", 1)
    assert stores[0].get("a") == 1


def test_rank_0_serves_the_store_at_the_address_of_its_node(
    tmp_path: Path, ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(module, "open_shared_store", lambda *arguments: opened.append(arguments[:3]))
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "10.0.0.8")
    ranks.run(lambda peers: checkpointer_of(peers.rank, tmp_path)._open_store())
    secret = run_secret(tmp_path)
    assert sorted(opened, key=str) == [("checkpoint", secret, "10.0.0.8"), ("checkpoint", secret, None)]
