"""The messages that nodes leave for each other in the run directory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.cluster.nodes.node_files import NodeBoard, NodeFailure, NodeRecord, State, Watch


def record(index: int, beat: int, state: State = "running") -> NodeRecord:
    return NodeRecord(index, f"n{index}", f"10.0.0.{index}", state, beat)


def test_records_and_their_absence(tmp_path: Path) -> None:
    board = NodeBoard(tmp_path)
    assert board.read(3) is None and board.failure() is None
    board.post(record(3, 1))
    board.post(record(3, 2))
    assert board.read(3) == record(3, 2)


def test_only_the_first_failure_counts(tmp_path: Path) -> None:
    board = NodeBoard(tmp_path)
    failures = [NodeFailure(f"n{i}", f"reason {i}") for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        claimed = list(pool.map(board.claim_failure, failures))
    assert sum(claimed) == 1
    assert board.failure() == failures[claimed.index(True)]
    assert [path.name for path in tmp_path.iterdir()] == ["failed.json"]


def test_a_silent_node_is_lost_and_a_finished_one_is_not(tmp_path: Path) -> None:
    now = [0.0]
    board = NodeBoard(tmp_path)
    watch = Watch(board, [0, 1, 2], 10.0, clock=lambda: now[0])
    board.post(record(0, 1))
    board.post(record(1, 1))
    assert watch.lost() == []
    now[0] = 9.0
    board.post(record(0, 2))
    assert watch.lost() == []
    now[0] = 10.5
    # Node 2 was never heard of; node 1 was, a moment after the start.
    assert watch.lost() == [(1, record(1, 1)), (2, None)]
    board.post(record(1, 1, "done"))
    board.post(record(2, 1))
    now[0] = 18.0
    assert watch.lost() == []
    board.post(record(0, 3))
    now[0] = 28.5
    assert watch.lost() == [(2, record(2, 1))]
