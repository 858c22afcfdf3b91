"""Ends agent loops that have not ended at their group's deadline, and wait for what nobody else bounds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from megarl.common.errors import RolloutError
from megarl.queue.trajectory import Trajectory
from megarl.rollout import background
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.group_deadline import GroupDeadline

logger = logging.getLogger(__name__)

LoopResult = Trajectory | Sequence[Trajectory]


class BoundedSample(Protocol):
    """A sample of a group, whose loop runs. `failure`: what it has raised. `given_up`: nobody waits for it any more."""

    group_id: int
    sample_index: int
    failure: Exception | None
    given_up: bool

    def is_late(self, now: float) -> bool:
        """Tell whether its loop has been left to itself longer than the group's deadline allows."""
        ...


async def ended_in_time(
    running: Coroutine[Any, Any, list[LoopResult]], loop: AgentLoop, samples: Sequence[BoundedSample],
    deadline: GroupDeadline | None,
) -> list[LoopResult]:  # fmt: skip
    """Return what the loops of a group return, which are `running`; without a deadline it waits until they end.

    Raises RolloutError, under either policy, if one of them has been left to itself longer than the deadline's grace
    allows: it waits for something that nobody else bounds. If another one has failed before, its error is raised.
    """
    if deadline is None:
        return await running
    working = asyncio.get_running_loop().create_task(running)
    try:
        while not working.done():
            now = time.monotonic()
            if late := [each for each in samples if each.is_late(now)]:
                failures = [each.failure for each in samples if each.failure is not None]
                raise failures[0] if failures else _late_error(loop, samples, late, deadline)
            first_s = deadline.at + deadline.grace_s - now
            await asyncio.wait({working}, timeout=first_s if first_s > 0 else background.LOOK_S)
        return working.result()
    finally:
        if not working.done():
            await _give_up(working, samples, deadline.cancel_s)


def _late_error(
    loop: AgentLoop, samples: Sequence[BoundedSample], late: Sequence[BoundedSample], deadline: GroupDeadline
) -> RolloutError:
    name = f"{type(loop).__module__}:{type(loop).__qualname__}"
    numbers = ", ".join([str(each.sample_index) for each in late[:8]] + ["..."] * (len(late) > 8))
    return RolloutError(
        f"the loop {name} had not ended in {len(late)} of {len(samples)} samples of group {samples[0].group_id} "
        f"({numbers}): it waited {deadline.grace_s:g} s after the group's deadline of {deadline.seconds:g} s "
        "(rollout.group_deadline_s) for something that is no engine, tool or reward; a loop has to end by "
        "`ctx.deadline`"
    )


async def _give_up(working: asyncio.Task[list[LoopResult]], samples: Sequence[BoundedSample], cancel_s: float) -> None:
    """End the loops of a group. One that ignores its cancellation goes on by itself, and gets nothing any more."""
    working.add_done_callback(_heard)
    working.cancel()
    try:
        await asyncio.wait({working}, timeout=cancel_s)
    finally:
        for sample in samples:
            sample.given_up = True
    if not working.done():
        logger.warning(
            "loops of group %d had not ended %.1f s after they were cancelled: they are given up",
            samples[0].group_id, cancel_s,
        )  # fmt: skip


def _heard(working: asyncio.Task[list[LoopResult]]) -> None:
    """Nobody asks any more how it has failed."""
    if not working.cancelled():
        working.exception()
