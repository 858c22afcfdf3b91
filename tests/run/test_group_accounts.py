"""Every group of a history, from its tags to the sums of both sides: all parts count the same groups."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from megarl.cluster.client import PoolClient
from megarl.config.pace import pace_of, refill_groups
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag, sample_key
from megarl.rollout.admission import Admission, usable_samples
from megarl.rollout.handover import Committed
from megarl.run.batch_metrics import record_batch
from megarl.run.pool_link import PoolLink
from megarl.run.recorder import Totals
from megarl.run.step import StepPlan, plan_step
from megarl.run.step_batch import StepBatch
from megarl.telemetry.declarations import step_metrics
from tests.support.configs import config as config_of

GROUPS, SAMPLES, STEPS = 3, 3, 4
OLD = -100  # a version that is too old for every step
# Samples of a group: (reward, status, version behind that of the group's start).
KINDS: dict[str, list[tuple[float, str, int]]] = {
    "signal": [(0.0, "ok", 0), (1.0, "ok", 0), (1.0, "ok", 0)],
    "signal of two": [(0.0, "failed", 0), (1.0, "ok", 0), (0.0, "ok", 0)],
    "no signal": [(1.0, "ok", 0), (1.0, "ok", 0), (1.0, "ok", 0)],
    "one usable sample": [(0.0, "failed", 0), (0.0, "failed", 0), (1.0, "ok", 0)],
    "nothing generated": [(0.0, "failed", 0), (0.0, "failed", 0), (0.0, "failed", 0)],
    "stale": [(0.0, "ok", 0), (1.0, "ok", OLD), (1.0, "ok", 0)],
    "stale without signal": [(1.0, "ok", OLD), (1.0, "ok", 0), (1.0, "ok", 0)],
}


class LocalClient(PoolClient):
    """Calls an admission as the controller does, instead of the controller."""

    def __init__(self, admission: Admission, config: Config) -> None:
        self.admission, self.config = admission, config

    def _call(self, method: str, args: Any, numbers: Any, timeout_s: float, **_: Any) -> tuple[Any, int]:  # type: ignore[override]
        assert method == "commit_and_tell"
        self.admission.commit(*args, **numbers)
        return Committed(self.admission.counters, {}), 0


class Accounts:
    """One history: the rollout side's admission, and the trainer's sums."""

    def __init__(self, max_uses: int) -> None:
        ahead: dict[str, Any] = {"mode": "async", "max_staleness": 3, "max_uses": max_uses} if max_uses > 1 else {}
        refill = {} if ahead else {"refill": True, "refill_limit": 1}
        self.config = config_of(
            "model",
            batch={"groups": GROUPS, "samples_per_group": SAMPLES},
            admission={**ahead, **refill},
            run__steps=STEPS,
        )
        pace = pace_of(self.config)
        self.admission = Admission(GROUPS, pace, refill=refill_groups(self.config), steps=STEPS, max_uses=max_uses)
        self.totals = Totals()
        self.link = PoolLink(self.config, None, SimpleNamespace(phase=None))  # type: ignore[arg-type]
        self.link._client.hold(LocalClient(self.admission, self.config))
        self.tags: dict[int, list[SampleTag]] = {}

    def generate(self, draw: st.DataObject) -> None:
        """Let every group finish that may start; some without signal leave their place to another one."""
        while started := self.admission.admit():
            for group in started:
                kind = KINDS[draw.draw(st.sampled_from(sorted(KINDS)), label=f"group {group}")]
                version = self.admission.version
                self.tags[group] = [
                    SampleTag(
                        sample_key(group, index), group, index, 3, 4, 4, version + behind, "stop", reward, {}, status
                    )  # type: ignore[call-arg, arg-type]
                    for index, (reward, status, behind) in enumerate(kind)
                ]
                if kind is KINDS["no signal"] and self.admission.replace(group, [version]):
                    continue
                self.admission.finish(group, usable_samples(tag.status for tag in self.tags[group]), [version])

    def step(self, number: int, skips: bool) -> StepPlan | None:
        """Train or skip a step, commit it and compare both sides; None if it has no groups."""
        if self.admission.batch(number) is None:
            return None
        ok, failed = self.admission.batch(number) or ([], [])
        reused = self.admission.reused(number)
        tags = [tag for group in sorted([*ok, *failed, *reused]) for tag in self.tags[group]]
        batch = StepBatch(number, number, [tag.key for tag in tags], tags, {}, self.admission.replaced(number), reused)
        plan = plan_step(tags, self.config, dp_size=2, version=number, replaced=batch.replaced, reused=batch.reused)
        if skips and (skipped := plan.skipped()) is not None:
            plan = skipped
        counted = self.link.commit(batch, plan)
        assert counted is not None and counted.balanced
        metrics = step_metrics()
        record_batch(metrics, plan)
        values = metrics.reduce()
        self.totals.add(values)
        self.totals.compare(number + 1, counted)
        ended = {name: len(groups) for name, groups in plan.ended.items()}
        assert ended == {name: values[f"groups/{name}"] for name in ended}
        assert ended | {"reused": len(reused)} == dataclasses.asdict(plan.outcome)
        return plan


@given(draw=st.data(), max_uses=st.sampled_from([1, 2]))
@settings(deadline=None)
def test_both_sides_count_the_same_groups_whatever_becomes_of_them(draw: st.DataObject, max_uses: int) -> None:
    accounts = Accounts(max_uses)
    for number in range(STEPS):
        accounts.admission.announce(number)
        accounts.admission.set_version(number)
        accounts.generate(draw)
        skips = draw.draw(st.booleans(), label=f"step {number} is skipped")
        plan = accounts.step(number, skips)
        if plan is None:
            event("a batch was not ready")
            return
        event("skipped" if plan.not_finite else "trained" if plan.mini_batches else "nothing to train")
        if plan.replaced:
            event("groups replaced")
