"""The waits of the trainer for rollout: for a batch, for an evaluation, for the end of running responses.

Each has a bound, and ends at once with a failure that ends the run. If all replicas are lost and only a publication of
the trainer's weights can bring others, a wait ends and says so: the trainer that waits is the one who must publish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from megarl.common.errors import BatchNotReady, RolloutError
from megarl.evaluation.harness import SetReport
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.orchestrator.evaluator import Evaluator
from megarl.rollout.orchestrator.prompt_groups import PromptGroups
from megarl.rollout.orchestrator.ready_batches import BatchReady, PublicationNeeded
from megarl.rollout.orchestrator.step_batches import StepBatches
from megarl.rollout.transport import background
from megarl.rollout.transport.background import BackgroundTasks, cancel_all


class TrainerWaits:
    """Waits on behalf of the trainer; `expect_publications` says whether there is one that publishes when it must."""

    def __init__(
        self,
        generate_s: float,
        tasks: BackgroundTasks,
        fleet: EnginePool,
        groups: PromptGroups,
        steps: StepBatches,
        evaluations: Evaluator,
        working: Callable[[], str],
    ) -> None:
        """`generate_s`: the bound of what has no other one. `working()`: what rewards and agent workers work on."""
        self._generate_s, self._tasks, self._fleet = generate_s, tasks, fleet
        self._groups, self._steps, self._evaluations, self._working = groups, steps, evaluations, working
        self._publishes = False  # whether a trainer is there that brings replicas by a publication when none is left

    def expect_publications(self, publishes: bool) -> None:
        """Record whether the trainer publishes as soon as it is told that it must."""
        self._publishes = publishes
        self._fleet.expect_publication(publishes)

    def needs_publication(self) -> str:
        """Return why the trainer must publish its weights now; empty if it need not, or would not."""
        return self._fleet.needs_publication if self._publishes else ""

    async def for_running_responses(self) -> None:
        """Let all running responses end; see `RolloutController.drain`."""
        ending = asyncio.ensure_future(self._fleet.drain(self._generate_s))
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=background.LOOK_S)
                self._tasks.check()
                if not ending.done() and self.needs_publication():
                    return
        finally:
            ending.cancel()
        ending.result()

    async def for_batch(self, step: int, timeout_s: float) -> BatchReady | PublicationNeeded:
        """Return the batch of `step`; see `RolloutController.wait_batch`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._tasks.check()
            if (batch := self._steps.taken(step) or self._steps.take(step)) is not None:
                return batch
            if reason := self.needs_publication():
                return PublicationNeeded(reason)
            try:
                await self._tasks.await_change(deadline - time.monotonic())
            except TimeoutError:
                raise self._not_ready(step, timeout_s) from None

    def _not_ready(self, step: int, waited_s: float) -> BatchNotReady:
        admission = self._groups.admission
        groups, replaced = sorted(admission.in_flight), admission.counters.replaced
        refilled = f", {replaced} groups without signal replaced (admission.refill)" if replaced else ""
        return BatchNotReady(
            f"the trainer waited {waited_s:.0f} s for the batch of step {step}; {len(groups)} groups in "
            f"flight: {groups[:8]}{refilled}, replicas alive: {self._fleet.serving}{self._working()}"
        )

    async def for_evaluation(self, version: int, label: str) -> list[SetReport] | PublicationNeeded:
        """Evaluate the weights of `version`; see `RolloutController.evaluate`."""
        evaluation = asyncio.ensure_future(self._evaluations.run(version, label))
        try:
            async with asyncio.timeout(self._generate_s):
                while not evaluation.done():
                    await asyncio.wait({evaluation}, timeout=background.LOOK_S)
                    if not evaluation.done() and (reason := self.needs_publication()):
                        return PublicationNeeded(reason)
        except TimeoutError:
            raise RolloutError(
                f"the trainer waited {self._generate_s:.0f} s (timeouts.generate_s) for an evaluation; replicas alive: "
                f"{self._fleet.serving}{self._working()}"
            ) from None
        finally:
            await cancel_all([evaluation], "evaluations")
        return evaluation.result()
