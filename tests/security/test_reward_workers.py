"""A reward function that forks: its child comes back into the worker's loop and answers for samples of others."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from megarl.rewards.types import RewardInput, RewardOutcome
from tests.support.checkout import ROOT
from tests.support.reward_pool import make_reward_pool, score_all

ANSWER_S = 60.0


@pytest.fixture
def unguarded() -> Iterator[Connection]:
    """The pool's end of the connection to an unguarded worker, which has a process group of its own."""
    ours, theirs = socket.socketpair()
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.unguarded_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            start_new_session=True,
        )
    with Connection(ours.detach()) as connection:
        yield connection
    worker.wait(timeout=10)  # it and its child end with the connection


def answer(connection: Connection) -> float:
    assert connection.poll(ANSWER_S), "the worker did not answer"
    reward: float = connection.recv()
    return reward


@pytest.mark.parametrize(("fork", "of_child"), [("fork", 1001.0), ("fork_exit", -1.0), ("fork_raise", -1.0)])
def test_the_attack_succeeds_on_an_unguarded_worker(unguarded: Connection, fork: str, of_child: float) -> None:
    """One sample gets two answers, so that each later sample gets the reward of the one before it."""
    unguarded.send(f"{fork} 1")
    first = answer(unguarded)
    assert unguarded.poll(ANSWER_S)  # a second answer, for which nobody has asked
    assert first in (1.0, of_child)
    unguarded.send("ok 2")
    assert answer(unguarded) in {1.0, of_child} - {first}  # of sample 1, taken for that of sample 2
    unguarded.send("ok 3")
    assert answer(unguarded) == 2.0  # of sample 2, taken for that of sample 3


@pytest.mark.parametrize("fork", ["fork", "fork_exit", "fork_raise", "fork_c"])
def test_the_attack_fails_on_the_pool(fork: str) -> None:
    pool = make_reward_pool("tests.support.reward_functions:hostile", timeout_s=20.0)
    try:
        for _ in range(2):
            samples = [RewardInput("", f"{fork if number == 1 else 'ok'} {number}") for number in range(1, 9)]
            assert score_all(pool, samples) == [RewardOutcome(float(number)) for number in range(1, 9)]
    finally:
        pool.close()
