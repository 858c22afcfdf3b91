"""The start of a child process: what it may report, and what it costs its parent if it reports something else."""

from collections.abc import Iterator

import psutil
import pytest

from megarl.common.process.child_process import ChildProcess, StartError

LONG_S = 120.0


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess("tests.support.rewards.child_programs", "the child")
    yield made
    made.close()
    assert not psutil.pid_exists(made.pid)


@pytest.mark.parametrize("how", ["", "fork"])
def test_a_report_is_json_of_the_child_alone(child: ChildProcess, how: str) -> None:
    assert child.handshake(how.encode(), LONG_S) == {"pid": child.pid, "text": "?"}
    child.connection.settimeout(0.5)
    with pytest.raises(TimeoutError):  # a child that it has forked would report too
        child.connection.recv(1)


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("die", StartError, "the child ended at its start: exit code 5"),
        ("pickle", StartError, "the child sent a message that is not an answer"),
        ("list", StartError, "the child sent a message that is not an answer"),
        ("flood", StartError, "the child sent a message of 2021161080 bytes, with a limit of 16777216 at its start"),
        ("problem", ValueError, "^not here$"),
    ],
)
def test_what_is_no_report_is_refused(child: ChildProcess, how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        child.handshake(how.encode(), LONG_S)


def test_a_child_that_does_not_report_is_waited_for_no_longer_than_its_time(child: ChildProcess) -> None:
    with pytest.raises(TimeoutError, match=r"the child was not ready after 0\.2 s"):
        child.handshake(b"hang", 0.2)
