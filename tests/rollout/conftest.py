"""The time of the tests of this package: it passes only while every task waits. They may be coroutines."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.support.measures import own_time

BOUND_S = 60.0  # of a coroutine; what waits in vain reaches it at once


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await pyfuncitem.obj(**given)

    asyncio.run(bounded())
    return True


@pytest.fixture(autouse=True)
def loops_in_their_own_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give loops a time of their own, but in modules that set REAL_TIME, and with real engines.

    They wait for other processes, or for threads that no loop has started.
    """
    if not getattr(request.module, "REAL_TIME", False) and request.node.get_closest_marker("engine") is None:
        own_time.install(monkeypatch)
