"""A service that is slow, dead or picky: no step waits for it, nothing is lost that need not be, all failures count."""

import io
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.common.rundir.run_files import ExitRecord, Status
from megarl.telemetry.metrics.progress import Progress
from megarl.telemetry.sinks import remote_sink
from megarl.telemetry.sinks.remote_sink import LostRecords, Record, RemoteSink
from megarl.telemetry.sinks.sinks import MetricsWriter
from tests.support.waiting import wait_until

PATIENCE_S = 30.0


class Service(RemoteSink):
    """A service whose answers the test decides."""

    name = "a service"

    def __init__(self, close_s: float = PATIENCE_S, **options: Any) -> None:
        super().__init__(close_s, **{"gather_s": 0.01} | options)
        self.taken: list[int] = []
        self.calls = 0
        self.ended: list[Status | None] = []
        self.problem: Exception | None = None
        self.open = threading.Event()
        self.open.set()

    def send(self, records: Sequence[Record]) -> None:
        self.calls += 1
        assert self.open.wait(PATIENCE_S)
        if self.problem is not None:
            raise self.problem
        self.taken += [record.step for record in records]

    def finish(self, status: Status | None) -> None:
        if self.problem is not None:
            raise self.problem
        self.ended.append(status)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_sink, "LONGEST_PAUSE_S", 0.02)


def test_records_are_gathered_between_two_sends() -> None:
    service = Service(gather_s=1e6)
    for step in range(5):
        service.write(step, {})
    assert service.calls == 0, "they wait for each other"
    service.close()
    assert service.taken == list(range(5)) and service.calls == 1


def test_all_records_arrive_once_and_in_order_with_the_status_of_the_run() -> None:
    service = Service()
    for step in range(500):
        service.write(step, {"reward/mean": float(step)})
    service.status = "preempted"
    service.close()
    assert service.taken == list(range(500)) and service.ended == ["preempted"]
    assert service.calls >= 500 / remote_sink.MOST_AT_ONCE


def test_what_a_service_did_not_take_is_sent_again() -> None:
    problems: list[Exception] = []
    service = Service()
    service.report = problems.append
    service.problem = ConnectionError("refused")
    for step in range(40):
        service.write(step, {})
    wait_until(lambda: len(problems) >= 3, PATIENCE_S, "three attempts")
    assert service.taken == []
    service.problem = None
    service.close()
    assert service.taken == list(range(40)) and service.ended == [None]
    assert all(str(problem) == "refused" for problem in problems)


def test_of_too_much_the_oldest_is_lost_and_reported() -> None:
    problems: list[Exception] = []
    service = Service(most_waiting=10)
    service.report = problems.append
    service.open.clear()
    service.write(0, {})
    wait_until(lambda: service.calls == 1, PATIENCE_S, "the first call")
    for step in range(1, 15):
        service.write(step, {})
    assert len(problems) == 5 and all(isinstance(each, LostRecords) for each in problems)
    assert "step 4 are lost" in str(problems[-1])
    service.open.set()
    service.close()
    assert service.taken == [0, *range(5, 15)]  # 0 was under way when it was given up


def test_records_that_are_refused_for_good_keep_no_others_back() -> None:
    problems: list[Exception] = []
    service = Service()
    service.report = problems.append
    service.problem = LostRecords("a name that is not allowed")
    service.write(1, {})
    wait_until(lambda: len(problems) == 1, PATIENCE_S, "the refusal")
    service.problem = None
    service.write(2, {})
    service.close()
    assert service.taken == [2] and len(problems) == 1


def test_a_service_that_never_answers_holds_neither_steps_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_sink, "SLOW_S", 0.05)
    problems: list[Exception] = []
    service = Service(0.2)
    service.report = problems.append
    service.open.clear()
    service.write(0, {})
    wait_until(lambda: service.calls == 1, PATIENCE_S, "the first call")
    for step in range(1, 100):
        service.write(step, {})
    time.sleep(0.1)  # longer than a call may take
    service.write(100, {})
    assert isinstance(problems[-1], TimeoutError)
    service.close()
    assert isinstance(problems[-1], LostRecords) and "101 records left" in str(problems[-1])
    service.open.set()


def test_a_run_goes_on_counts_the_failures_and_tells_the_user_once_a_minute(tmp_path: Path) -> None:
    terminal, service = io.StringIO(), Service(0.5)
    service.problem = ConnectionError("no route")
    with MetricsWriter([service], None, Progress(terminal, 9), tmp_path) as writer:
        for step in range(1, 10):
            writer.write(step, {"reward/mean": 0.5})
        writer.flush()
        wait_until(lambda: writer.failures >= 3, PATIENCE_S, "three failures")
        writer.write_exit(ExitRecord("finished", 9, ""))
    text = terminal.getvalue()
    assert text.count("warning:") == 1
    assert "a service could not be written (no route); the run continues and tries again; 1 failed writes" in text
    assert service.status == "finished"


def test_a_run_that_fails_without_a_record_tells_so(tmp_path: Path) -> None:
    for record in (None, ExitRecord("preempted", 3, "asked to stop")):
        service = Service()
        with MetricsWriter([service], None, Progress(io.StringIO(), 9), tmp_path) as writer:
            writer.write(1, {"reward/mean": 0.5})
            if record is not None:
                writer.write_exit(record)
        assert service.ended == [record.status if record else None]
