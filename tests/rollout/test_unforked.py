"""Agent loops that fork or freeze too much cost themselves at most."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from megarl.rollout import eval_context
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.single_turn import SingleTurn
from megarl.rollout.group_runner import GroupRunner
from megarl.rollout.loop_context import FROZEN_BYTES
from megarl.rollout.unforked import unforked
from tests.support.checkout import ROOT, environment
from tests.support.configs import config
from tests.support.fake_rollout import FakeBatcher, FakeRewards, FakeSource


@pytest.mark.parametrize("how", ["returns", pytest.param("raises", marks=pytest.mark.slow), "waits"])
def test_a_forked_child_that_comes_back_from_a_loop_ends(how: str) -> None:
    """Without the guard the child would end the group a second time, or wait with its parent's event loop."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forking_loop", how],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "rows 4\n"), done.stderr[-3000:]
    assert "a child that an agent loop had forked came back from the loop: it was ended" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_loops_of_an_evaluation_are_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[object] = []

    async def guard(loop: Any) -> Any:
        guarded.append(loop)
        return await loop

    class Context:
        def ended(self, made: object) -> object:
            return made

    class Loop:
        async def run(self, ctx: object) -> str:
            return "row"

    monkeypatch.setattr(eval_context, "unforked", guard)
    loop: Any = Loop()
    ctx: Any = Context()
    made: Any = asyncio.run(eval_context.evaluate_response(loop, ctx))
    assert made == "row" and len(guarded) == 1


def test_results_exceptions_and_cancellations_pass() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("of the loop")

    async def waits(seen: list[str]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    async def catches() -> str:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, OSError("of what is awaited"))
        try:
            await future
        except OSError as error:
            return str(error)
        return ""

    async def scenario() -> None:
        assert await unforked(asyncio.sleep(0.01, "result")) == "result"
        assert await unforked(catches()) == "of what is awaited"
        with pytest.raises(LookupError, match="of the loop"):
            await unforked(fails())
        seen: list[str] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await unforked(waits(seen))
        assert seen == ["cancelled", "cleaned up"]

    asyncio.run(scenario())


@dataclass
class State:
    text: str


class Freezes(SingleTurn):
    """A loop that freezes a state of a size."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def run(self, ctx: AgentContext) -> Any:
        ctx.freeze(State("x" * self.size))
        return await super().run(ctx)


@pytest.mark.parametrize(("size", "fits"), [(FROZEN_BYTES - 100, True), (FROZEN_BYTES + 1, False)])
def test_a_state_that_is_too_large_fails_its_group(size: int, fits: bool) -> None:
    source: Any = FakeSource()
    rewards: Any = FakeRewards()
    runner = GroupRunner(config("model"), Freezes(size), source, FakeBatcher(), rewards, partition="p")
    if fits:
        assert len(asyncio.run(runner.run(0))) == 4
    else:
        with pytest.raises(ValueError, match=f"freezes has {size + 11} bytes of JSON; {FROZEN_BYTES} at most"):
            asyncio.run(runner.run(0))
