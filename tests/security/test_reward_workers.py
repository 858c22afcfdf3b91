"""A reward function that forks: its child comes back into the worker's loop and answers for samples of others."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megarl.rewards.types import RewardInput, RewardResult
from tests.support.checkout import ROOT
from tests.support.rewards.reward_pool import make_reward_pool, score_all

pytestmark = pytest.mark.slow

ANSWER_S = 60.0


@pytest.fixture
def unguarded() -> Iterator[socket.socket]:
    """The pool's end of the connection to an unguarded worker. Each message is read as a whole by one process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.attacks.unguarded_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )
    with ours:
        ours.settimeout(ANSWER_S)
        yield ours
    worker.wait(timeout=60)  # it and its child end with the connection


def has_answered(connection: socket.socket) -> bool:
    """Wait for an answer, and leave it there."""
    return bool(connection.recv(1 << 10, socket.MSG_PEEK))


def score(connection: socket.socket, response: str) -> float:
    """The reward of a response, as a pool without numbers takes it: the next answer."""
    connection.send(response.encode())
    return float(connection.recv(1 << 10))


@pytest.mark.parametrize(
    ("fork", "of_child"), [("fork", 1001.0), ("fork_exit", -1.0), ("fork_raise", -1.0), ("fork_c", 1001.0)]
)
def test_the_attack_succeeds_on_an_unguarded_worker(unguarded: socket.socket, fork: str, of_child: float) -> None:
    """One sample gets two answers, so that each later sample gets the reward of the one before it."""
    first = score(unguarded, f"{fork} 1")
    assert first in (1.0, of_child)
    assert has_answered(unguarded)  # a second time, for which nobody has asked
    assert score(unguarded, "ok 2") in {1.0, of_child} - {first}  # of sample 1
    for number in range(3, 10):
        assert has_answered(unguarded)
        assert score(unguarded, f"ok {number}") == number - 1


@pytest.mark.parametrize("fork", ["fork", "fork_exit", "fork_raise", "fork_c"])
def test_the_attack_fails_on_the_pool(fork: str) -> None:
    pool = make_reward_pool("tests.support.rewards.reward_functions:hostile", timeout_s=20.0)
    try:
        for _ in range(2):
            samples = [RewardInput("", f"{fork if number == 1 else 'ok'} {number}") for number in range(1, 9)]
            assert score_all(pool, samples) == [RewardResult(float(number)) for number in range(1, 9)]
    finally:
        pool.close()
