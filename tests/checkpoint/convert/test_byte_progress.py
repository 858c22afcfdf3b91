"""The progress of a conversion: what is written when, on a terminal and elsewhere."""

import io

import pytest

from megarl.checkpoint.convert import job
from megarl.checkpoint.convert.job import ByteProgress, size

GB = 10**9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The present time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds_with_what_is_done_and_how_long_the_rest_takes(clock: list[float]) -> None:
    """The speed is of this start only: a resumed conversion did not copy the first 2 GB in its 20 seconds."""
    stream = io.StringIO()
    progress = ByteProgress(stream, "import", 10 * GB, start=2 * GB)
    for now, count in ((109.0, GB), (110.0, GB), (119.0, GB), (120.0, GB)):
        clock[0] = now
        progress.add(count)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "import: 4.00 GB of 10.00 GB (40%), 200.00 MB/s, 30s left",
        "import: 6.00 GB of 10.00 GB (60%), 200.00 MB/s, 20s left",
    ]


def test_a_terminal_has_one_line_that_is_replaced_and_removed(clock: list[float]) -> None:
    stream = Terminal()
    progress = ByteProgress(stream, "verify", 4 * GB)
    for now in (100.1, 100.3, 100.6):
        clock[0] = now
        progress.add(GB)
    assert [line.split(",")[0] for line in stream.getvalue().split("\r\x1b[2K")] == [
        "", "verify: 2.00 GB of 4.00 GB (50%)", "verify: 3.00 GB of 4.00 GB (75%)",
    ]  # fmt: skip
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_nothing_to_do_is_all_done(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = ByteProgress(stream, "export", 0)
    clock[0] = 111.0
    progress.add(0)
    assert stream.getvalue() == "export: 0 B of 0 B (100%), 0 B/s, - left\n"


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (1000, "1.00 kB"), (1.5e6, "1.50 MB"), (8.04e9, "8.04 GB"), (2e12, "2.00 TB")]
)
def test_sizes_have_powers_of_ten(count: float, text: str) -> None:
    assert size(count) == text
