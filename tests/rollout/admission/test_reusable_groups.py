"""Groups that are trained again: which they are, and that both sides of a run agree (the rules: test_admission.py)."""

import asyncio
import collections
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from megarl.config.schema import Config
from megarl.queue.dump import DumpedBatch
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from megarl.rollout.admission.groups_in_flight import ReplayUse, ReusableGroups
from megarl.run.step.plan import GroupOutcome, plan_step
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.rollout.fake_rollout import LocalController, local_controller
from tests.support.trainer.configs import config as config_of

USES = st.dictionaries(st.integers(0, 20), st.builds(ReplayUse, st.integers(-3, 3), st.integers(1, 4)), max_size=8)


def test_a_group_is_used_at_least_once() -> None:
    with pytest.raises(ValueError, match="max_uses must be >= 1, got 0"):
        ReusableGroups(0)


STEPS, TRAINING_S, GENERATION_S = 25, 0.01, 0.05


@pytest.fixture
def config() -> Config:
    return config_of(
        "model",
        batch={"groups": 3, "samples_per_group": 2},
        admission={"mode": "async", "sync_interval": 2, "max_staleness": 7, "max_uses": 3},
        algorithm={"filter_zero_variance": False},  # the rewards of the fake parts are equal within a group
        telemetry={"dump_batches": True},
        run={"steps": STEPS},
    )


class Trainer:
    """A trainer that plans as the real one does, and asks for each batch while the one before it trains."""

    def __init__(self, config: Config, local: LocalController) -> None:
        self.config, self.local = config, local
        self.batches: dict[int, DumpedBatch] = {}
        self.uses: collections.Counter[int] = collections.Counter()
        self.totals: collections.Counter[str] = collections.Counter()

    async def run(self) -> None:
        controller = self.local.controller
        await controller.begin(None)
        await controller.set_version(0)
        following = asyncio.create_task(controller.wait_batch(0, 20.0))
        for step in range(STEPS):
            early = controller._steps._batches.get(step)
            assert early is None or not early.reused, "filled up before the trainer needs it"
            await controller.admit(step)
            batch = await following
            if step + 1 < STEPS:
                following = asyncio.create_task(controller.wait_batch(step + 1, 20.0))
            rows = [self.local.queue.rows[key] for key in batch.keys]
            self.batches[step] = DumpedBatch(step, step, rows)
            plan = plan_step([row.tag for row in rows], self.config, dp_size=1, version=step, reused=batch.reused)
            await asyncio.sleep(TRAINING_S)
            self.uses.update({tag.group_id for tag in plan.tags.values()})
            await self.commit(step, plan.outcome, plan.trained_groups)
            await asyncio.sleep(TRAINING_S)  # as for a publication
            if (step + 1) % 2 == 0:
                await controller.set_version(step + 1)

    async def commit(self, step: int, outcome: GroupOutcome, trained_groups: list[int]) -> None:
        self.totals.update(vars(outcome))
        await self.local.controller.commit(step, **vars(outcome), trained_groups=trained_groups)


async def test_trainer_and_controller_agree_on_every_use(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = local_controller(config, tmp_path, monkeypatch)
    trainer, draw, answer = Trainer(config, local), random.Random(0), local.fleet.generate

    async def generate(context: Any, requests: Any, **options: Any) -> Any:
        await asyncio.sleep(draw.uniform(0.5, 1.5) * GENERATION_S)
        return await answer(context, requests, **options)

    local.fleet.generate = generate  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        await trainer.run()
    await asyncio.sleep(0.05)  # the rows of the last step are removed by a task
    counters = await local.controller.counters()
    reported = {name: getattr(counters, name) for name in trainer.totals}
    assert reported == trainer.totals and counters.balanced
    assert (counters.in_flight, counters.ready, counters.reusable) == (0, 0, 0) and not local.queue.rows
    assert trainer.totals["reused"] > 0 and trainer.totals["trained"] + trainer.totals["reused"] == 3 * STEPS
    assert trainer.totals["dropped_stale"] == 0 and max(trainer.uses.values()) in (2, 3)
    assert sum(trainer.uses.values()) == 3 * STEPS and len(trainer.uses) == trainer.totals["trained"]
    schedule = replay_schedule(read_schedule(tmp_path / SCHEDULE_FILE))
    for step, batch in trainer.batches.items():
        schedule[step].check(batch)
    assert sum(len(each.reused) for each in schedule.values()) == trainer.totals["reused"]
