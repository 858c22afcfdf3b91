"""Waiting for a condition, and for the end of what a scenario has begun."""

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.05) -> None:
    """Poll `condition`; raises TimeoutError that names `what` was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(interval_s)


async def end_other_tasks(timeout_s: float = 30.0) -> None:
    """Cancel all other tasks of this loop, and those that they begin at their end, until none is left.

    `asyncio.run` cancels once. What a cancelled task begins, such as a call that stops a request, would be in a loop
    that is closed.
    """
    async with asyncio.timeout(timeout_s):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for each in others:
                each.cancel()
            await asyncio.wait(others)
            await asyncio.sleep(0)  # callbacks of their end
