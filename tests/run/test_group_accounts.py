"""Every group of a history, from its tags to the sums of both sides: all parts count the same groups."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from megarl.cluster.client.pool_client import PoolClient
from megarl.common.values import first_parts
from megarl.config.derived.staleness import pace_of, refill_groups
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag, sample_key
from megarl.rollout.admission.admission import Admission
from megarl.rollout.orchestrator.failover import CommitAnswer
from megarl.rollout.orchestrator.prompt_groups import usable_samples
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.record.batch_metrics import record_batch
from megarl.run.record.recorder import Totals
from megarl.run.step.plan import StepPlan, plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.trained_groups import trained_as_planned

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
    "stale with one usable sample": [(0.0, "failed", OLD), (0.0, "failed", 0), (1.0, "ok", OLD)],
    "stale without signal": [(1.0, "ok", OLD), (1.0, "ok", 0), (1.0, "ok", 0)],
}


class LocalClient(PoolClient):
    """Calls an admission as the controller does, instead of the controller."""

    def __init__(self, admission: Admission, config: Config) -> None:
        self.admission, self.config, self.timeouts = admission, config, config.timeouts

    def _call(self, method: str, args: Any, numbers: Any, timeout_s: float, **_: Any) -> tuple[Any, int]:  # type: ignore[override]
        assert method == "commit_and_report"
        self.admission.commit(*args, **numbers)
        return CommitAnswer(self.admission.counters, {}), 0


class Accounts:
    """One history: the rollout side's admission, and the trainer's sums."""

    def __init__(self, max_uses: int) -> None:
        ahead: dict[str, Any] = {"mode": "async", "max_staleness": 3, "max_uses": max_uses} if max_uses > 1 else {}
        refill = {} if ahead else {"refill": True}
        self.config = config_of(
            "model",
            batch={"groups": GROUPS, "samples_per_group": SAMPLES},
            admission={**ahead, **refill},
            run__steps=STEPS,
        )
        pace = pace_of(self.config)
        self.admission = Admission(GROUPS, pace, refill=refill_groups(self.config), steps=STEPS, max_uses=max_uses)
        self.totals = Totals()
        self.link = RolloutClient(self.config, None, SimpleNamespace(phase=None))  # type: ignore[arg-type]
        self.link.controller = LocalClient(self.admission, self.config)  # type: ignore[assignment]
        self.tags: dict[int, list[SampleTag]] = {}
        self.running: dict[int, int] = {}  # group -> version at its start

    def generate(self, draw: st.DataObject, number: int) -> None:
        """Let groups finish, at least those that the step needs; some without signal leave their place to another."""
        later = draw.draw(st.integers(0, 2 * GROUPS), label="groups that may finish later")
        while True:
            self.running |= dict.fromkeys(self.admission.admit(), self.admission.version)
            enough = len(self.running) <= later and self.admission.batch(number) is not None
            if enough or not self.running:
                return
            self.finish(draw, min(self.running))

    def finish(self, draw: st.DataObject, group: int) -> None:
        """Let a group finish as one of the kinds, with tokens of the version at which it has started."""
        kind = KINDS[draw.draw(st.sampled_from(sorted(KINDS)), label=f"group {group}")]
        version = self.running.pop(group)
        self.tags[group] = [
            tag
            for index, (reward, status, behind) in enumerate(kind)
            for tag in tags_of(draw, group, index, reward, status, version + behind)
        ]
        if kind is not KINDS["no signal"] or not self.admission.replace(group, [version]):
            usable = usable_samples(tag.status for tag in first_parts(self.tags[group]))
            self.admission.finish(group, usable, [version])

    def step(self, number: int, skips: bool) -> StepPlan:
        """Train or skip a step, commit it and compare both sides."""
        taken = self.admission.batch(number)
        assert taken is not None
        ok, failed = taken
        reused = sorted(self.admission.taken(number).reused)
        tags = [tag for group in sorted([*ok, *failed, *reused]) for tag in self.tags[group]]
        replaced = self.admission.taken(number).replaced
        plan = plan_step(tags, self.config, dp_size=2, version=number, replaced=replaced, reused=reused)
        if skips and (skipped := plan.skipped()) is not None:
            plan = skipped
        counted = self.link.commit(number, plan)
        assert counted is not None and counted.balanced
        metrics = step_metrics()
        record_batch(metrics, plan, trained_as_planned(plan))
        values = metrics.reduce()
        self.totals.add(values)
        self.totals.compare(number + 1, counted)
        ended = {name: len(groups) for name, groups in plan.ended.items()}
        assert ended == {name: values[f"groups/{name}"] for name in ended}
        assert ended | {"reused": len(reused)} == dataclasses.asdict(plan.outcome)
        assert values["batch/samples"] == SAMPLES * len([*ok, *failed, *reused])
        return plan


def test_both_sides_count_the_same_groups_whatever_becomes_of_them() -> None:
    seen: set[str] = set()

    @given(draw=st.data(), max_uses=st.sampled_from([1, 2]))
    def check(draw: st.DataObject, max_uses: int) -> None:
        accounts = Accounts(max_uses)
        for number in range(STEPS):
            accounts.admission.announce(number)
            accounts.admission.set_version(number)
            accounts.generate(draw, number)
            plan = accounts.step(number, draw.draw(st.booleans(), label=f"step {number} is skipped"))
            seen.add("skipped" if plan.not_finite else "trained" if plan.mini_batches else "nothing to train")
            seen.update({"replaced"} if plan.replaced else (), {"used again"} if plan.reused else ())

    check()
    assert seen == {"skipped", "trained", "nothing to train", "replaced", "used again"}


def tags_of(
    draw: st.DataObject, group: int, index: int, reward: float, status: str, version: int, tokens: int = 4
) -> list[SampleTag]:
    """The tags of a sample, which may have several parts."""
    parts = draw.draw(st.integers(1, 3), label=f"parts of sample {group}:{index}")
    return [
        SampleTag(
            sample_key(group, index, part), group, index, 3, tokens, tokens, version, "stop", reward, {}, status,  # type: ignore[arg-type]
            part=part,
        )
        for part in range(parts)
    ]  # fmt: skip


ANY_SAMPLE = st.tuples(
    st.sampled_from([0.0, 1.0]), st.sampled_from(["ok", "failed"]), st.sampled_from([OLD, 0]), st.integers(0, 4)
)


@given(draw=st.data(), samples=st.lists(ANY_SAMPLE, min_size=2, max_size=5))
def test_both_sides_agree_on_every_group(draw: st.DataObject, samples: list[tuple[float, str, int, int]]) -> None:
    """A group fails in the plan if rollout counts it as failed, and only then; so the commit of any is accepted."""
    accounts = Accounts(max_uses=1)
    admission = Admission(1, pace_of(accounts.config), steps=1)
    admission.announce(0)
    admission.set_version(0)
    (group,) = admission.admit()
    tags = [
        tag
        for index, (reward, status, version, tokens) in enumerate(samples)
        for tag in tags_of(draw, group, index, reward, status, version, tokens)
    ]
    admission.finish(group, usable_samples(tag.status for tag in first_parts(tags)), [0])
    _, failed = admission.batch(0) or ([], [])
    plan = plan_step(tags, accounts.config, dp_size=1, version=0)
    event(next(name for name, groups in plan.ended.items() if groups))
    assert plan.ended["failed"] == failed
    numbers = dataclasses.asdict(plan.outcome)
    admission.commit(0, **numbers, ended=plan.ended)
    assert admission.counters.balanced
