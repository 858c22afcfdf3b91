"""A service that is slow, dead or picky: no step waits for it, nothing is lost that need not be, all failures count."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megarl.common.rundir.run_files import ExitRecord, Status
from megarl.telemetry.metrics.progress import Progress
from megarl.telemetry.sinks import remote_sink
from megarl.telemetry.sinks.remote_sink import LostRecords, Record, RemoteSink
from megarl.telemetry.sinks.sinks import MetricsWriter
from tests.support.waiting import wait_until

PATIENCE_S = 30.0


class Service:
    """A service whose answers the test decides."""

    name = "a service"

    def __init__(self) -> None:
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


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(remote_sink, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_sink, "LONGEST_PAUSE_S", 0.02)
    service = Service()
    yield service
    service.open.set()


def test_all_records_arrive_once_and_in_order_with_the_status_of_the_run(service: Service) -> None:
    sink = RemoteSink(service, PATIENCE_S)
    for step in range(500):
        sink.write(step, {"reward/mean": float(step)})
    sink.status = "preempted"
    sink.close()
    assert service.taken == list(range(500)) and service.ended == ["preempted"]
    assert service.calls >= 500 / remote_sink.MOST_AT_ONCE


def test_values_are_those_of_the_call(service: Service) -> None:
    seen: list[float] = []
    service.send = lambda records: seen.extend(record.values["reward/mean"] for record in records)  # type: ignore[method-assign]
    sink, values = RemoteSink(service, PATIENCE_S), {"reward/mean": 1.0}
    service.open.clear()
    sink.write(1, values)
    values["reward/mean"] = 2.0
    sink.close()
    assert seen == [1.0]


def test_what_a_service_did_not_take_is_sent_again(service: Service) -> None:
    problems: list[Exception] = []
    sink = RemoteSink(service, PATIENCE_S)
    sink.report_to(problems.append)
    service.problem = ConnectionError("refused")
    for step in range(40):
        sink.write(step, {})
    wait_until(lambda: len(problems) >= 3, PATIENCE_S, "three attempts")
    assert service.taken == []
    service.problem = None
    sink.close()
    assert service.taken == list(range(40)) and service.ended == [None]
    assert all(str(problem) == "refused" for problem in problems)


def test_of_too_much_the_oldest_is_lost_and_told(service: Service) -> None:
    problems: list[Exception] = []
    sink = RemoteSink(service, PATIENCE_S, most_waiting=10)
    sink.report_to(problems.append)
    service.open.clear()
    sink.write(0, {})
    wait_until(lambda: service.calls == 1, PATIENCE_S, "the first call")
    for step in range(1, 15):
        sink.write(step, {})
    assert len(problems) == 5 and all(isinstance(each, LostRecords) for each in problems)
    assert "step 4 are lost" in str(problems[-1])
    service.open.set()
    sink.close()
    assert service.taken == [0, *range(5, 15)]  # 0 was under way when it was given up


def test_records_that_are_refused_for_good_keep_no_others_back(service: Service) -> None:
    problems: list[Exception] = []
    sink = RemoteSink(service, PATIENCE_S)
    sink.report_to(problems.append)
    service.problem = LostRecords("a name that is not allowed")
    sink.write(1, {})
    wait_until(lambda: len(problems) == 1, PATIENCE_S, "the refusal")
    service.problem = None
    sink.write(2, {})
    sink.close()
    assert service.taken == [2] and len(problems) == 1


def test_a_service_that_never_answers_holds_neither_steps_nor_the_end(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_sink, "SLOW_S", 0.05)
    problems: list[Exception] = []
    sink = RemoteSink(service, 0.2)
    sink.report_to(problems.append)
    service.open.clear()
    sink.write(0, {})
    wait_until(lambda: service.calls == 1, PATIENCE_S, "the first call")
    for step in range(1, 100):
        sink.write(step, {})
    time.sleep(0.1)  # longer than a call may take
    sink.write(100, {})
    assert isinstance(problems[-1], TimeoutError)
    sink.close()
    assert isinstance(problems[-1], LostRecords) and "101 records wait" in str(problems[-1])


def test_a_run_goes_on_counts_the_failures_and_tells_the_user_once_a_minute(service: Service, tmp_path: Path) -> None:
    terminal = io.StringIO()
    service.problem = ConnectionError("no route")
    sink = RemoteSink(service, 0.5)
    with MetricsWriter([sink], None, Progress(terminal, 9), tmp_path) as writer:
        for step in range(1, 10):
            writer.write(step, {"reward/mean": 0.5})
        writer.flush()
        wait_until(lambda: writer.failures >= 3, PATIENCE_S, "three failures")
        writer.write_exit(ExitRecord("finished", 9, ""))
    text = terminal.getvalue()
    assert text.count("warning:") == 1
    assert "a service could not be written (no route); the run goes on and tries again; 1 failed writes" in text
    assert sink.status == "finished"


def test_a_run_that_fails_without_a_record_tells_so(service: Service, tmp_path: Path) -> None:
    for record in (None, ExitRecord("preempted", 3, "asked to stop")):
        with MetricsWriter([RemoteSink(service, PATIENCE_S)], None, Progress(io.StringIO(), 9), tmp_path) as writer:
            writer.write(1, {"reward/mean": 0.5})
            if record is not None:
                writer.write_exit(record)
    assert service.ended == [None, "preempted"]


def test_records_are_gathered_between_two_sends_and_the_first_and_the_last_wait_for_none(service: Service) -> None:
    sink = RemoteSink(service, PATIENCE_S, gather_s=1e6)
    sink.write(0, {})
    wait_until(lambda: service.taken == [0], PATIENCE_S, "the first record")
    for step in range(1, 6):
        sink.write(step, {})
        time.sleep(0.02)
    assert service.calls == 1, "five records wait for each other"
    sink.close()
    assert service.taken == list(range(6)) and service.calls == 2


def test_as_many_records_as_fit_into_a_send_wait_no_longer(service: Service) -> None:
    sink = RemoteSink(service, PATIENCE_S, gather_s=1e6)
    sink.write(0, {})
    wait_until(lambda: service.calls == 1, PATIENCE_S, "the first record")
    for step in range(1, remote_sink.MOST_AT_ONCE + 1):
        sink.write(step, {})
    wait_until(lambda: len(service.taken) == remote_sink.MOST_AT_ONCE + 1, PATIENCE_S, "a full send")
    sink.close()
