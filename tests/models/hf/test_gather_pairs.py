"""Ranks connect in pairs before the first gather: in an order in which all meet, and with a bound."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import PeerTimeout
from megarl.models.hf.gather_pairs import Pair, connect_pairs, pairs_of

CPU = torch.device("cpu")
# At most one group of each kind has both ranks of a pair, as the tensor-parallel groups of one layout.
group_lists = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), min_size=2, max_size=4, unique=True).map(lambda ranks: tuple(sorted(ranks))),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda each: (each[0][0], each[1]),
)


class StandInGroups:
    """Answers torch's questions about groups that are only names and ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "nccl") -> None:
        distributed = torch.distributed
        monkeypatch.setattr(distributed, "get_backend", lambda group: backend)
        monkeypatch.setattr(distributed, "get_process_group_ranks", lambda group: list(group.ranks))

    @staticmethod
    def parts(groups: list[tuple[tuple[int, ...], bool]], rank: int) -> list[Any]:
        """The parts of `rank`: two tensors of each of its groups, in an order of its own, and one that it has whole."""
        mine = [
            SimpleNamespace(
                group=SimpleNamespace(ranks=ranks),
                shard=SimpleNamespace(entry=SimpleNamespace(expert=0 if experts else None)),
            )
            for ranks, experts in groups
            if rank in ranks
        ]
        whole = SimpleNamespace(group=None, shard=SimpleNamespace(entry=SimpleNamespace(expert=None)))
        return [whole, *mine[rank % 2 :], *mine]


@given(group_lists)
def test_all_ranks_meet_in_any_groups(groups: list[tuple[tuple[int, ...], bool]]) -> None:
    """Each rank blocks in its first pair until the other rank does too; pairs of a group are owner and peer."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in = StandInGroups(monkeypatch)
        left = {rank: pairs_of(stand_in.parts(groups, rank), rank) for rank in range(8)}
    keys = {rank: [(p.owner, p.peer, p.experts) for p in pairs] for rank, pairs in left.items()}
    expected = {(ranks[0], peer, experts) for ranks, experts in groups for peer in ranks[1:]}
    assert {key for each in keys.values() for key in each} == expected
    while any(keys.values()):
        met = [each[0] for rank, each in keys.items() if each and rank == each[0][0] and keys[each[0][1]][0] == each[0]]
        assert met, f"all wait for each other: {keys}"
        for owner, peer, _ in met:
            keys[owner].pop(0)
            keys[peer].pop(0)


def test_groups_of_gloo_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pairs_of(StandInGroups(monkeypatch, backend="gloo").parts([((0, 1), False)], 0), 0) == []


class Arrived:
    def wait(self) -> None:
        """It has come."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Messages by kind and the other rank. Rank 3 never comes: the call does not return during the test."""
    found: list[tuple[str, int]] = []

    def message(kind: str, other: int) -> Arrived:
        found.append((kind, other))
        if other == 3:
            never.wait(30.0)
        if other == 4:
            raise RuntimeError("the connection is lost")
        return Arrived()

    never = threading.Event()
    monkeypatch.setattr(torch.distributed, "irecv", lambda tensor, src, group: message("irecv", src))
    monkeypatch.setattr(torch.distributed, "isend", lambda tensor, dst, group: message("isend", dst))
    yield found
    never.set()


def pairs(*ranks: tuple[int, int]) -> list[Pair]:
    return [Pair(owner, peer, False, None) for owner, peer in ranks]  # type: ignore[arg-type]


def test_owners_receive_and_peers_send(calls: list[tuple[str, int]]) -> None:
    connect_pairs(pairs((0, 1), (1, 2)), 1, CPU, 20.0)
    assert calls == [("isend", 0), ("irecv", 2)]


def test_a_rank_that_does_not_come_is_named_in_time(calls: list[tuple[str, int]]) -> None:
    with pytest.raises(PeerTimeout, match=r"trainer rank 0 waited \d+ s for trainer rank 3 to connect for gathers"):
        connect_pairs(pairs((0, 1), (0, 3), (0, 5)), 0, CPU, 0.3)
    assert calls == [("irecv", 1), ("irecv", 3)]


def test_an_error_of_the_thread_is_raised(calls: list[tuple[str, int]]) -> None:
    with pytest.raises(RuntimeError, match="the connection is lost"):
        connect_pairs(pairs((0, 4)), 0, CPU, 20.0)
