"""One thread writes in order; whoever waits for it waits for a bounded time, and learns of every failure."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from megarl.telemetry.sinks.writer_thread import WriterHungError, WriterThread
from tests.support.waiting import wait_until

PATIENCE_S = 60.0  # of a test for what comes at once
SOON_S = 0.2  # the bound of a wait that has to end


class Gate:
    """A write that ends when it is opened."""

    def __init__(self) -> None:
        self._open, self.entered = threading.Event(), threading.Event()
        self.open = self._open.set

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def writer(bound_s: float = PATIENCE_S, most: int = 256) -> WriterThread:
    return WriterThread("the metrics writer", bound_s, "timeouts.save_s", most)


def close(thread: WriterThread, bound_s: float = PATIENCE_S) -> None:
    thread.close([], bound_s, "timeouts.shutdown_s")


def test_all_writes_are_of_one_thread_that_ends_with_the_close() -> None:
    thread, threads = writer(), []
    for _ in range(9):
        thread.submit("a file", lambda: threads.append(threading.current_thread()))
    close(thread)
    [only] = set(threads)
    assert only.name == "the-metrics-writer" and only.daemon
    only.join(PATIENCE_S)
    assert not only.is_alive()
    with pytest.raises(RuntimeError, match="the metrics writer is closed; a file cannot be written"):
        thread.submit("a file", lambda: None)


def test_no_more_than_its_number_waits(gate: Gate) -> None:
    thread, third = writer(most=2), threading.Event()
    thread.submit("a file", gate)
    thread.submit("a file", lambda: None)
    waiting = threading.Thread(target=lambda: thread.submit("a file", third.set), daemon=True)
    waiting.start()
    assert not third.wait(SOON_S) and waiting.is_alive() and len(thread._waiting) == 2
    gate.open()
    assert third.wait(PATIENCE_S)


class Clock:
    """Stands for `time`: moved by the writes alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


WAITS: dict[str, Callable[[WriterThread], None]] = {
    "a place": lambda thread: [thread.submit("another", lambda: None) for _ in range(9)] and None,
    "all writes": lambda thread: thread.flush(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_write_that_does_not_end_is_named_within_the_bound(gate: Gate, wait: str) -> None:
    thread = writer(SOON_S, most=4)
    thread.submit("WandbSink", gate)
    thread.submit("metrics.jsonl", lambda: None)
    assert gate.entered.wait(PATIENCE_S)
    with pytest.raises(
        WriterHungError,
        match=r"the metrics writer has written nothing for 0 s \(timeouts.save_s\): it is busy with WandbSink, and",
    ):
        WAITS[wait](thread)


def test_the_bound_is_of_one_write_and_not_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("megarl.telemetry.sinks.writer_thread.time", clock)
    thread = writer(PATIENCE_S)
    for _ in range(8):
        thread.submit("a slow file", partial(clock.pass_s, PATIENCE_S - 1.0))
    thread.flush()


@pytest.mark.parametrize("how", ["flush", "submit", "close"])
def test_a_failure_is_raised_by_the_next_call_and_the_next_write_is_made(how: str) -> None:
    thread, done, failed = writer(), [], threading.Event()

    def fail() -> None:
        failed.set()
        raise KeyError("a mistake")

    thread.submit("a file", fail)
    assert failed.wait(PATIENCE_S)
    wait_until(lambda: not thread._waiting, PATIENCE_S, "the end of the write")
    with pytest.raises(KeyError, match="a mistake"):
        if how == "submit":
            thread.submit("a file", partial(done.append, 1))
        else:
            thread.flush() if how == "flush" else close(thread)
    if how != "close":
        thread.submit("a file", partial(done.append, 2))
        close(thread)
        assert done == ([1, 2] if how == "submit" else [2])
