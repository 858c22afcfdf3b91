"""The time of the tests of this package: it passes only while every task waits."""

import pytest

from tests.support.measures import own_time


@pytest.fixture(autouse=True)
def loops_in_their_own_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give loops a time of their own, but in modules that set REAL_TIME, and with real engines.

    They wait for other processes, or for threads that no loop has started.
    """
    if not getattr(request.module, "REAL_TIME", False) and request.node.get_closest_marker("engine") is None:
        own_time.install(monkeypatch)
