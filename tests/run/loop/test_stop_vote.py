"""All ranks stop for the same reason, whoever was asked to."""

import errno
import io
from pathlib import Path

import pytest

from megarl.common.clocks import RateLimit
from megarl.common.rundir import run_files
from megarl.common.rundir.run_files import ask_to_stop
from megarl.run.loop import stop
from megarl.run.loop.stop import StopSignals, StopVote
from tests.support.trainer.thread_ranks import ThreadPeers, ThreadRanks

WORLD = 3


def signals_of(run_dir: Path) -> StopSignals:
    return StopSignals(run_dir, run_dir / "checkpoints", io.StringIO(), speaks=False)


def vote(run_dir: Path, *, signalled: tuple[int, ...] = ()) -> list[str | Exception | None]:
    """Return what each rank agrees to; `signalled`: the ranks that have received SIGTERM."""

    def on_rank(peers: ThreadPeers) -> str | None:
        own = run_dir if peers.is_first else run_dir / "of_another_node"  # only rank 0 may look for the file
        signals = signals_of(run_dir)
        signals.raised = peers.rank in signalled
        ballot = StopVote(own, peers, signals)  # type: ignore[arg-type]
        return ballot.agree()

    return ThreadRanks(size=WORLD).run(on_rank)


def test_without_a_request_the_run_goes_on(tmp_path: Path) -> None:
    assert vote(tmp_path) == [None] * WORLD


def test_the_file_that_rank_0_finds_gives_every_rank_its_reason(tmp_path: Path) -> None:
    ask_to_stop(tmp_path, "the time limit is near")
    assert vote(tmp_path) == ["the time limit is near"] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
def test_sigterm_to_any_rank_stops_all(tmp_path: Path, rank: int) -> None:
    assert vote(tmp_path, signalled=(rank,)) == ["a stop signal"] * WORLD


def test_the_reason_in_the_file_comes_before_the_signal(tmp_path: Path) -> None:
    ask_to_stop(tmp_path, "")
    assert vote(tmp_path, signalled=(2,)) == ["asked to stop"] * WORLD


def test_a_file_system_that_fails_is_no_request_and_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception on rank 0 alone would leave the others in the all-reduce."""
    ask_to_stop(tmp_path, "the time limit is near")
    monkeypatch.setattr(run_files, "_complaints", RateLimit(60.0))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale")))
        assert vote(tmp_path) == vote(tmp_path) == [None] * WORLD
        assert vote(tmp_path, signalled=(1,)) == ["a stop signal"] * WORLD
    assert caplog.text.count("cannot be read, which counts as no request for now: [Errno 116] Stale") == 1
    assert vote(tmp_path) == ["the time limit is near"] * WORLD


def test_the_reason_is_that_of_the_look_that_has_found_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells what it has voted for, also if the next read fails."""
    looks = iter(["the time limit is near", None])
    monkeypatch.setattr(stop, "stop_reason", lambda run_dir: next(looks))
    assert vote(tmp_path) == ["the time limit is near"] * WORLD


def test_a_file_that_only_another_rank_sees_is_no_request(tmp_path: Path) -> None:
    (tmp_path / "of_another_node").mkdir()
    ask_to_stop(tmp_path / "of_another_node", "left there")
    assert vote(tmp_path) == [None] * WORLD
