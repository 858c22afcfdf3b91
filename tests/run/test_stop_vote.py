"""All ranks stop for the same reason, whoever was asked to."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.common.run_files import ask_to_stop
from megarl.run.stop_vote import StopVote
from tests.support.thread_ranks import ThreadPeers, ThreadRanks

WORLD = 3


def vote(run_dir: Path, *, signalled: tuple[int, ...] = ()) -> list[str | Exception | None]:
    """Return what each rank agrees to; `signalled`: the ranks that have received SIGTERM."""

    def on_rank(peers: ThreadPeers) -> str | None:
        own = run_dir if peers.is_first else run_dir / "of_another_node"  # only rank 0 may look for the file
        ballot = StopVote(own, peers)  # type: ignore[arg-type]
        ballot._termination.raised = peers.rank in signalled
        return ballot.agree()

    return ThreadRanks(size=WORLD).run(on_rank)


def test_without_a_request_the_run_goes_on(tmp_path: Path) -> None:
    assert vote(tmp_path) == [None] * WORLD


def test_the_file_that_rank_0_finds_gives_every_rank_its_reason(tmp_path: Path) -> None:
    ask_to_stop(tmp_path, "the time limit is near")
    assert vote(tmp_path) == ["the time limit is near"] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
def test_sigterm_to_any_rank_stops_all(tmp_path: Path, rank: int) -> None:
    assert vote(tmp_path, signalled=(rank,)) == ["SIGTERM"] * WORLD


def test_the_reason_in_the_file_comes_before_the_signal(tmp_path: Path) -> None:
    ask_to_stop(tmp_path, "")
    assert vote(tmp_path, signalled=(2,)) == ["asked to stop"] * WORLD


def test_a_file_that_only_another_rank_sees_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "of_another_node").mkdir()
    ask_to_stop(tmp_path / "of_another_node", "left there")
    assert vote(tmp_path) == [None] * WORLD


@pytest.fixture
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_handler")
def test_an_installed_vote_turns_sigterm_into_a_request(tmp_path: Path) -> None:
    """Without the handler the signal would end this process."""
    found: list[StopVote] = []
    ranks = ThreadRanks()
    ranks.run(lambda peers: found.append(StopVote(tmp_path, peers)))  # type: ignore[arg-type]
    (ballot,) = found
    ballot.install()
    assert ranks.run(lambda _: ballot.agree()) == [None]
    os.kill(os.getpid(), signal.SIGTERM)
    assert ranks.run(lambda _: ballot.agree()) == ["SIGTERM"]
