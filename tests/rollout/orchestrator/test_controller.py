"""The controller without engines: batches of a step, failed groups, and what a restarted trainer finds."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.filters import ShapingSpec
from megarl.common.errors import BatchNotReady, NoReplicaLeft, RolloutError
from megarl.config.derived import staleness
from megarl.evaluation.harness import SetReport
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.rewards.types import RewardResult
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.fleet.external_requests import ExternalNews, ExternalRequest
from megarl.rollout.orchestrator import prompt_groups
from megarl.rollout.orchestrator.failover import Failover
from megarl.rollout.orchestrator.step_batches import BatchReady, PublicationNeeded
from megarl.rollout.resume.journal import JOURNAL_FILE
from megarl.rollout.resume.journal_file import JournalFile, groups_started
from megarl.rollout.transport import background
from megarl.run.step.plan import plan_step
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.rollout.fake_rollout import LocalController, local_controller
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
WAIT_S = 5.0
Make = Callable[..., LocalController]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that makes a controller with an agent loop, and with these changes of its config."""

    def made(loop: AgentLoop | None = None, **changes: Any) -> LocalController:
        config = config_of("model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, **changes)
        return local_controller(config, tmp_path, monkeypatch, loop)

    return made


@pytest.fixture
def local(make: Make) -> LocalController:
    return make()


def keys_of(*groups: int) -> list[str]:
    return [f"{group}:{index}" for group in groups for index in range(SAMPLES)]


async def test_the_batches_of_two_steps(local: LocalController) -> None:
    controller, queue = local.controller, local.queue
    for step in range(2):
        counters = await controller.set_version(step)
        assert (counters.admitted, counters.in_flight) == (GROUPS * (step + 1), GROUPS)
        assert (await controller.admit()).admitted == GROUPS * (step + 1)  # the version allows no more
        batch = await controller.wait_batch(step, WAIT_S)
        groups = range(step * GROUPS, (step + 1) * GROUPS)
        assert batch.keys == keys_of(*groups) and set(batch.keys) == queue.rows.keys()
        assert batch is await controller.wait_batch(step, WAIT_S)  # until it is committed
        assert batch.timings["rollout/replicas_alive"] == 1 and batch.counters.taken == GROUPS
        counters = await controller.commit(step, trained=2, filtered=1, dropped_stale=0, failed=0)
        assert counters.balanced and (counters.trained, counters.filtered) == (2 * (step + 1), step + 1)
        await asyncio.sleep(0)  # the rows are removed by a task
        assert not queue.rows
    assert await controller.references([4]) == {4: "answer 4"}
    source = controller._source  # what a curriculum is given
    assert source.committed == [([0, 1, 2], 1, 3), ([3, 4, 5], 2, 6)]
    assert source.finished == {group: [group + 1.0] * SAMPLES for group in range(6)}


async def test_versions_without_admission_start_nothing(local: LocalController) -> None:
    """The loop publishes a version, evaluates it, and only then lets groups start."""
    assert (await local.controller.set_version(0, admit=False)).admitted == 0
    assert (await local.controller.admit()).admitted == GROUPS
    assert local.fleet.joined == 1  # replaced replicas serve from the version on


async def test_a_batch_that_does_not_come_names_the_groups_in_flight(local: LocalController) -> None:
    local.fleet.held = {1}
    await local.controller.set_version(0)
    said = r"waited 0 s for the batch of step 0; groups in flight: 1 \[1\].*; waiting for the reward of 3 samples"
    with pytest.raises(BatchNotReady, match=said):
        await local.controller.wait_batch(0, 0.1)
    await local.controller.shutdown()


async def test_on_shared_gpus_a_batch_waits_for_all_groups_up_to_the_next_publication(make: Make) -> None:
    """Then every step up to there has its batch while the engines sleep. What is missing needs a publication."""
    local = make(rollout__share_gpus=True, admission={"mode": "stream", "sync_interval": 2})
    controller = local.controller
    local.fleet.held = {GROUPS}  # one of the second step
    await controller.set_version(0, admit=False)
    assert (await controller.admit(0)).in_flight == 2 * GROUPS
    with pytest.raises(BatchNotReady, match=rf"groups in flight: 1 \[{GROUPS}\]"):
        await controller.wait_batch(0, 0.2)
    missing = await controller.wait_batch(0, WAIT_S, True)
    assert missing == PublicationNeeded("the engines sleep, and groups up to the next publication are missing")
    local.fleet.held = set()
    await controller.begin(None)
    await controller.set_version(0, admit=False)
    await controller.admit(0)
    for step, asleep in enumerate((False, True)):
        taken = await controller.wait_batch(step, WAIT_S, asleep)
        assert isinstance(taken, BatchReady) and taken.groups == [GROUPS * step + i for i in range(GROUPS)]
        await controller.commit(step, trained=GROUPS, filtered=0, dropped_stale=0, failed=0)
    assert (await controller.counters()).in_flight == 0


class FailsInGroup1:
    """Fails in one sample of group 1, after another sample of that group has been answered."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.group_id == 1 and ctx.sample_index == 1:
            raise ConnectionError("the tool is gone")
        return await SingleTurn().run(ctx)


class Branches:
    """Sample i returns i + 1 trajectories of equal reward."""

    async def run(self, ctx: AgentContext) -> list[Trajectory]:
        return [await SingleTurn().run(ctx)] * (ctx.sample_index + 1)


async def test_samples_with_several_trajectories_are_queued_trained_resumed_and_freed_as_a_whole(
    make: Make, tmp_path: Path
) -> None:
    local = make(Branches(), telemetry={"dump_batches": True})
    controller, queue = local.controller, local.queue

    def keys(*groups: int) -> list[str]:
        return [f"{group}:{key}" for group in groups for key in ("0", "1", "1.1")]

    await controller.begin(None)
    await controller.set_version(0)
    batch = await controller.wait_batch(0, WAIT_S)
    assert batch.keys == keys(0, 1, 2) and set(batch.keys) == queue.rows.keys()
    assert controller._source.finished == {group: [group + 1.0] * SAMPLES for group in range(GROUPS)}
    before = dict(queue.rows)
    # The journal has them all: a trainer that begins again gets the same rows without an engine.
    await controller.begin(None)
    assert not queue.rows
    local.fleet.failures = {group: NoReplicaLeft(0, "nothing may be generated") for group in range(GROUPS)}
    await controller.set_version(0)
    again = await controller.wait_batch(0, WAIT_S)
    assert again.keys == batch.keys and queue.rows == before
    plan = plan_step([queue.rows[key].tag for key in again.keys], controller.config, dp_size=2, version=0)
    numbers = {name: len(groups) for name, groups in plan.ended.items()}
    counters = await controller.commit(0, **numbers, ended=plan.ended)
    assert counters.balanced and counters.settled == GROUPS
    await asyncio.sleep(0)
    assert not queue.rows and not controller._groups.queued
    await controller.shutdown()
    assert sorted(replay_schedule(read_schedule(tmp_path / SCHEDULE_FILE))) == [0]


class MarksTheWrongSample:
    """Returns a trajectory of another group."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        row = await SingleTurn().run(ctx)
        return row if ctx.group_id != 1 else Trajectory(**{**vars(row), "group_id": 7})


@pytest.mark.parametrize(
    ("loop", "failure"),
    [
        (FailsInGroup1(), "the tool is gone"),
        (MarksTheWrongSample(), "the agent loop of sample 1:0 returned a trajectory of 7:0"),
    ],
)
async def test_a_failed_group_is_counted_and_the_others_are_trained(make: Make, loop: AgentLoop, failure: str) -> None:
    local = make(loop)
    await local.controller.set_version(0)
    batch = await local.controller.wait_batch(0, WAIT_S)
    rows = [local.queue.rows[key] for key in batch.keys]
    assert batch.keys == keys_of(0, 1, 2)
    assert [row.status for row in rows] == ["ok", "ok", "failed", "failed", "ok", "ok"]
    assert [(row.failure, row.prompt_ids, row.response_ids, row.oldest_version) for row in rows[2:4]] == [
        (failure, [], [], -1)
    ] * SAMPLES
    counters = await local.controller.commit(0, trained=2, filtered=0, dropped_stale=0, failed=1)
    assert counters.balanced and (counters.trained, counters.failed) == (2, 1)
    assert local.controller._admission.unsettled == []  # no group is drawn again


async def test_a_group_whose_samples_all_fail_in_the_engine_is_failed(local: LocalController) -> None:
    """Samples with a defect are not scored; a group needs two good ones. Such groups in a row end the run."""
    bad, empty = {0, 1}, local.fleet.generate

    async def generate(context: RequestContext, requests: list, **options: Any) -> list:
        results = await empty(context, requests, **options)
        if context.prefix not in bad:
            return results
        return [replace(result, finish_reason="abort") for result in results]

    local.fleet.generate = generate  # type: ignore[method-assign]
    await local.controller.set_version(0)
    await local.controller.wait_batch(0, WAIT_S)
    why = ["aborted"] * 2 * SAMPLES + [""] * SAMPLES
    assert [row.failure for _, row in sorted(local.queue.rows.items())] == why
    bad.update(range(GROUPS, 3 * GROUPS))
    counters = await local.controller.commit(0, trained=1, filtered=0, dropped_stale=0, failed=2)
    assert counters.balanced and counters.failed == 2
    await local.controller.set_version(1)
    message = f"{GROUPS} prompt groups in a row failed .*{SAMPLES} of {SAMPLES} samples cannot be used; .*aborted"
    with pytest.raises(RolloutError, match=message):
        await local.controller.wait_batch(1, WAIT_S)


async def test_samples_without_a_reward_are_failed_samples_and_no_zeros(local: LocalController) -> None:
    """Those of one group, whose text has two characters; the metrics count them."""
    late = RewardResult(0.0, error="timeout: no reward after 10 s", reason="timeout", dropped=True, redone=1)
    local.rewards.script[2] = [late] * SAMPLES
    await local.controller.set_version(0)
    batch = await local.controller.wait_batch(0, WAIT_S)
    rows = [local.queue.rows[key] for key in batch.keys]
    assert [row.status for row in rows] == ["ok", "ok", "failed", "failed", "ok", "ok"]
    assert {row.failure for row in rows[2:4]} == {row.reward_error for row in rows[2:4]} == {late.error}
    assert (batch.timings["reward/errors"], batch.timings["reward/redone"]) == (SAMPLES, SAMPLES)
    assert batch.timings["rollout/failed_length_mean"] == batch.timings["rollout/failed_length_max"] == 2
    counters = await local.controller.commit(0, trained=2, filtered=0, dropped_stale=0, failed=1)
    assert counters.balanced and (counters.trained, counters.failed) == (2, 1)


async def test_a_reward_function_that_fails_too_often_ends_the_run_with_its_own_message(local: LocalController) -> None:
    message = "the reward function 'judge:f' failed for 16 of the latest 16 samples; LookupError: no key"
    local.rewards.failure = RewardPoolError(message)
    await local.controller.set_version(0)
    with pytest.raises(RolloutError) as caught:
        await local.controller.wait_batch(0, WAIT_S)
    assert str(caught.value) == message


async def test_an_evaluation_that_does_not_end_names_what_it_waits_for(make: Make) -> None:
    local = make(timeouts={"generate_s": 0.1})

    async def never(version: int, label: str) -> list[SetReport]:
        await asyncio.sleep(60)
        return []

    local.controller._evaluations.run = never  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match=r"generate_s\) for an evaluation; .*; waiting for the reward of 3 samples"):
        await local.controller.evaluate(0, "before")


@pytest.fixture
def refilling(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a controller with dynamic sampling, at most GROUPS a step; rewards are equal in groups without `signal`.

    The text of group g has g + 1 characters, and equal rewards are that number.
    """
    monkeypatch.setattr(staleness, "REFILL_LIMIT", 1)

    def made(signal: set[int]) -> LocalController:
        local = make(admission={"refill": True})
        local.rewards.script = {group + 1: [0.0, 1.0] for group in signal}
        return local

    return made


async def test_groups_without_signal_are_replaced_before_the_queue(refilling: Make, tmp_path: Path) -> None:
    local = refilling({0, 2, 4, 5, 6, 7})
    controller = local.controller
    await controller.set_version(0)
    batch = await controller.wait_batch(0, WAIT_S)
    assert batch.keys == keys_of(0, 2, 4) and set(local.queue.rows) == set(batch.keys)
    assert batch.replaced == [1, 3] and batch.counters.taken == GROUPS + 2 and batch.counters.balanced
    values = batch.timings
    assert (values["rollout/groups_replaced"], values["rollout/groups_replaced_share"]) == (2, 0.4)
    assert values["rollout/replaced_reward_mean"] == (2 + 4) / 2
    assert values["rollout/replaced_tokens"] == SAMPLES * (2 + 4)
    assert groups_started(tmp_path / JOURNAL_FILE) == GROUPS + 2
    with pytest.raises(ValueError, match="do not account for its 5 groups"):
        await controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0)
    counters = await controller.commit(0, trained=3, filtered=2, dropped_stale=0, failed=0)
    assert counters.settled == counters.admitted == GROUPS + 2
    assert controller._source.committed == [([0, 1, 2, 3, 4], 1, GROUPS + 2)]
    await controller.set_version(1)
    batch = await controller.wait_batch(1, WAIT_S)
    assert batch.keys == keys_of(5, 6, 7) and batch.replaced == []
    assert batch.timings["rollout/groups_replaced"] == 0 and "rollout/replaced_tokens" not in batch.timings


async def test_what_has_signal_depends_on_the_limit_of_the_group_s_own_set(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [{"name": "a", "path": "a"}, {"name": "b", "path": "b", "sampling": {"max_tokens": 7}}]
    local = make(admission={"refill": True}, data={"path": None, "sets": sets})
    local.controller._source.sets = {0: "a", 1: "b", 2: "a"}
    asked = {}

    def without_signal(group: Sequence[SampleTag], spec: ShapingSpec) -> bool:
        asked[group[0].group_id] = spec.max_tokens
        return False

    monkeypatch.setattr(prompt_groups, "without_signal", without_signal)
    await local.controller.set_version(0)
    await local.controller.wait_batch(0, WAIT_S)
    limit = local.controller.config.sampling.max_tokens
    assert asked == {0: limit, 1: 7, 2: limit} and limit != 7


async def test_a_batch_that_does_not_come_says_how_many_groups_were_replaced(refilling: Make) -> None:
    local = refilling({0})
    local.fleet.held = {3}
    await local.controller.set_version(0)
    while (await local.controller.counters()).ready < GROUPS - 1:
        await asyncio.sleep(0.01)
    with pytest.raises(RolloutError, match=r"flight: 1 \[3\], 3 groups without signal replaced \(admission.refill\)"):
        await local.controller.wait_batch(0, 0.1)
    await local.controller.shutdown()


async def test_a_failed_group_is_not_replaced(refilling: Make) -> None:
    local = refilling({0, 2})
    local.fleet.failures = {1: TimeoutError("late")}
    await local.controller.set_version(0)
    batch = await local.controller.wait_batch(0, WAIT_S)
    assert batch.keys == keys_of(0, 1, 2) and batch.replaced == []


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (8, "group 0 has tokens of version 8, which was never published; the last is 7"),
        (6, "group 0 was started at version 7 and has a token of version 6"),
    ],
)
async def test_tokens_labelled_with_another_version_end_the_run(local: LocalController, served: int, said: str) -> None:
    """Already in the first step, whose batch the trainer does not get."""
    local.fleet.version = lambda: served
    await local.controller.announce(7)
    await local.controller.set_version(7)
    with pytest.raises(RolloutError, match=said):
        await local.controller.wait_batch(0, WAIT_S)


async def test_begin_resets_the_failure_policy(local: LocalController) -> None:
    """GROUPS failures in a row end the run; those before a restart of the trainer do not count."""
    failing = range(GROUPS - 1)
    local.fleet.failures = {group: TimeoutError("late") for group in failing}
    local.fleet.held = {GROUPS - 1}
    for _ in range(3):
        await local.controller.begin(None)
        while (await local.controller.set_version(0)).in_flight > 1:
            await asyncio.sleep(0.01)
        assert {row.failure for row in local.queue.rows.values()} == {"late"}
    local.fleet.failures[GROUPS - 1], local.fleet.held = TimeoutError("late"), set()
    await local.controller.begin(None)
    await local.controller.set_version(0)
    with pytest.raises(RolloutError, match=f"{GROUPS} prompt groups in a row failed in rollout; the last"):
        await local.controller.wait_batch(0, WAIT_S)


async def test_a_failure_that_ends_the_run_is_raised_by_every_call_until_begin(local: LocalController) -> None:
    controller = local.controller
    local.fleet.failures = {1: NoReplicaLeft(0, "replica 0 died")}
    await controller.set_version(0)
    with pytest.raises(NoReplicaLeft, match="replica 0 died"):
        await controller.wait_batch(0, WAIT_S)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: controller.wait_batch(0, WAIT_S),
        lambda: controller.set_version(1),
        controller.admit,
        lambda: controller.announce(1),
        controller.drain,
        lambda: controller.evaluate(0),
        lambda: controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0),
    ]
    for call in calls:
        with pytest.raises(NoReplicaLeft, match="replica 0 died"):
            await call()
    local.fleet.failures = {}
    await controller.begin(None)
    await controller.set_version(0)
    assert (await controller.wait_batch(0, WAIT_S)).keys == keys_of(*range(GROUPS))


async def test_groups_that_start_while_running_responses_end_have_their_whole_deadline(make: Make) -> None:
    """It counts from when they may begin: otherwise the wait for a publication would cut responses to nothing."""
    local = make(rollout={"group_deadline_s": 30.0, "partial_rollout": False}, timeouts={"generate_s": 77.0})
    begins, deadlines = asyncio.Event(), []
    answer = local.fleet.generate

    async def may_begin() -> None:
        await begins.wait()

    async def generate(context: RequestContext, requests: list, **options: Any) -> list:
        assert context.deadline is not None
        deadlines.append(context.deadline.at)
        return await answer(context, requests, **options)

    local.fleet.may_begin, local.fleet.generate = may_begin, generate  # type: ignore[method-assign]
    await local.controller.drain()
    assert local.fleet.drained == [77.0]
    await local.controller.set_version(0)
    await asyncio.sleep(0.05)
    assert deadlines == [] and (await local.controller.counters()).in_flight == GROUPS
    opened = time.monotonic()
    begins.set()
    await local.controller.wait_batch(0, WAIT_S)
    assert len(deadlines) == GROUPS and min(deadlines) >= opened + 30.0


@pytest.mark.parametrize("dump", [True, False])
async def test_the_schedule_is_recorded_where_batches_are(make: Make, tmp_path: Path, dump: bool) -> None:
    """Over a restart of the trainer, whose second step replaces the one that the checkpoint does not hold."""
    # Without a journal the groups of the second step are drawn again.
    local = make(telemetry={"dump_batches": dump}, rollout={"journal_s": 0.0})
    local.fleet.failures = {1: TimeoutError("late")}
    controller, path = local.controller, tmp_path / SCHEDULE_FILE

    async def step(number: int, failed: int) -> None:
        await controller.set_version(number)
        await controller.wait_batch(number, WAIT_S)
        await controller.commit(number, trained=GROUPS - failed, filtered=0, dropped_stale=0, failed=failed)

    await controller.begin(None)
    await step(0, 1)
    state = await controller.state_dict()
    await step(1, 0)
    local.fleet.failures[4] = TimeoutError("late")
    await controller.begin(state)
    await step(1, 1)
    assert path.is_file() is dump
    if dump:
        found = replay_schedule(read_schedule(path))
        assert {number: (batch.ok, batch.failed) for number, batch in found.items()} == {
            0: ([0, 2], [1]),
            1: ([3, 5], [4]),
        }


@pytest.fixture
def reusing(make: Make) -> LocalController:
    """A controller whose groups may be trained twice; of those that start, 4 and all later ones never finish."""
    reuse = {"mode": "async", "sync_interval": 1, "max_staleness": 3, "max_uses": 2}
    made = make(admission=reuse, telemetry={"dump_batches": True}, run={"steps": 5})
    made.fleet.held = set(range(4, 20))
    return made


async def train_two_steps(local: LocalController) -> None:
    """The second one is asked for while the first one trains, and has one new group."""
    controller = local.controller
    await controller.begin(None)
    assert (await controller.set_version(0)).admitted == 2 * GROUPS
    assert (await controller.wait_batch(0, WAIT_S)).keys == keys_of(0, 1, 2)
    asked = asyncio.create_task(controller.wait_batch(1, WAIT_S))
    await asyncio.sleep(0.05)
    assert not asked.done(), "the trainer has work, and more groups may finish"
    counters = await controller.commit(0, trained=2, filtered=1, dropped_stale=0, failed=0, trained_groups=[0, 2])
    assert (counters.trained, counters.reusable) == (2, 2)
    await asyncio.sleep(0.05)
    assert not asked.done(), "the trainer publishes weights, and more groups may finish"
    await controller.admit(1)
    batch = await asked
    assert (batch.keys, batch.groups, batch.reused) == (keys_of(0, 2, 3), [3], [0, 2])
    assert set(local.queue.rows) == set(batch.keys), "rows of a filtered group are freed, those of trained ones stay"
    await controller.set_version(1)
    ends = {"trained": 1, "filtered": 0, "dropped_stale": 0, "failed": 0}
    with pytest.raises(ValueError, match="step 1 took 2 groups to train them again, not 1"):
        await controller.commit(1, **ends, reused=1, trained_groups=[3])
    counters = await controller.commit(1, **ends, reused=2, trained_groups=[3])
    assert counters.balanced and (counters.trained, counters.filtered, counters.reused) == (3, 1, 2)
    await asyncio.sleep(0)
    assert set(local.queue.rows) == set(keys_of(3)), "groups that were used twice are freed"


async def test_groups_are_trained_again_while_new_ones_are_generated(reusing: LocalController, tmp_path: Path) -> None:
    controller = reusing.controller
    await train_two_steps(reusing)
    assert controller._source.committed == [([0, 1, 2], 1, 6), ([3], 2, 8)], "a curriculum sees each group once"
    with pytest.raises(BatchNotReady, match="waited 0 s for the batch of step 2"):
        await controller.wait_batch(2, 0.1)  # it has no new group
    assert set(reusing.queue.rows) == set(keys_of(3))
    await controller.shutdown()
    schedule = replay_schedule(read_schedule(tmp_path / SCHEDULE_FILE))
    assert [(each.ok, each.reused) for each in schedule.values()] == [([0, 1, 2], []), ([3], [0, 2])]


async def test_what_one_trainer_waited_for_fills_up_no_batch_of_the_next_one(reusing: LocalController) -> None:
    """Its step 1 is not filled up before it waits for it, though the trainer before has waited for a step 1."""
    await train_two_steps(reusing)
    await train_two_steps(reusing)
    await reusing.controller.shutdown()


async def test_a_resume_uses_no_settled_group_again_and_leaves_no_rows(reusing: LocalController) -> None:
    controller = reusing.controller
    await train_two_steps(reusing)
    state = await controller.state_dict()
    assert state["admission"]["unsettled"] == [4, 5, 6, 7]
    reusing.fleet.held = set()
    counters = await controller.begin(state)
    assert controller._source.resumed_at[-1] == (8, 2, 4)
    assert not reusing.queue.rows and (counters.reusable, counters.reused, counters.trained) == (0, 2, 3)
    for step in range(2, 5):
        await controller.set_version(step)
        await controller.admit(step)
        batch = await controller.wait_batch(step, WAIT_S)
        assert len(batch.groups + batch.reused) == GROUPS and min(batch.groups + batch.reused) > 3
        ends = {"trained": len(batch.groups), "filtered": 0, "dropped_stale": 0, "failed": 0}
        uses = {"reused": len(batch.reused), "trained_groups": batch.groups}
        counters = await controller.commit(step, **ends, **uses)
    await asyncio.sleep(0.05)
    assert not reusing.queue.rows, "rows are left at the end of the run"
    assert counters.in_flight == counters.ready == counters.reusable == 0 and counters.balanced


async def test_a_queue_that_fails_ends_the_run(local: LocalController) -> None:
    """Its rows are missing, so the group cannot be counted as failed either."""
    local.queue.failure = TimeoutError("process 7 waited 60 s for the trajectory queue to take 2 rows")
    await local.controller.set_version(0)
    with pytest.raises(RolloutError, match="rollout failed: process 7 waited 60 s"):
        await local.controller.wait_batch(0, WAIT_S)


async def test_the_commit_of_a_trainer_that_has_gone_changes_nothing_for_the_next_one(local: LocalController) -> None:
    """Its curriculum takes so long that the next trainer begins meanwhile."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        await go.wait()

    source = local.controller._source
    source.curriculum = slow  # type: ignore[attr-defined]
    await local.controller.set_version(0)
    await local.controller.wait_batch(0, WAIT_S)
    old = asyncio.create_task(local.controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0))
    await begun.wait()
    await local.controller.begin(None)
    go.set()
    with pytest.raises(RolloutError, match="commit of step 0 was given up: another trainer has begun"):
        await old
    assert source.committed == []  # type: ignore[attr-defined]
    assert (await local.controller.counters()).admitted == 0


@pytest.mark.parametrize("helps", ["the end of the run", "the publication"])
async def test_a_drain_does_not_wait_for_responses_that_will_not_come(
    local: LocalController, monkeypatch: pytest.MonkeyPatch, helps: str
) -> None:
    """A group's failure ends the run at once; and if all replicas are lost, an evaluation waits for the publication."""
    monkeypatch.setattr(background, "LOOK_S", 0.01)
    ended: list[str] = []

    async def drain(timeout_s: float) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("drain")

    local.fleet.drain = drain  # type: ignore[method-assign]
    await local.controller.begin(None)
    draining = asyncio.create_task(local.controller.drain())
    await asyncio.sleep(0.03)
    assert not draining.done()
    async with asyncio.timeout(WAIT_S):
        if helps == "the publication":
            local.fleet.needs_publication = "replica 0 has died"
            await draining
        else:
            local.fleet.failures = {1: NoReplicaLeft(0, "replica 0 died")}
            await local.controller.set_version(0)
            with pytest.raises(NoReplicaLeft, match="replica 0 died"):
                await draining
    await asyncio.sleep(0)
    assert ended == ["drain"]


async def test_what_goes_wrong_in_a_drain_is_raised(local: LocalController) -> None:
    async def drain(timeout_s: float) -> None:
        raise RolloutError("waited 77 s for replica 0")

    local.fleet.drain = drain  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="waited 77 s"):
        await local.controller.drain()


async def test_begin_drops_what_the_trainer_before_left_and_redraws_it(local: LocalController) -> None:
    controller = local.controller
    await controller.set_version(0)
    await controller.wait_batch(0, WAIT_S)
    await controller.commit(0, trained=3, filtered=0, dropped_stale=0, failed=0)
    state = json.loads(json.dumps(await controller.state_dict()))
    local.fleet.held = {4}  # one group of step 1 is in flight when the trainer dies, the others are in the queue
    await controller.set_version(1)
    while len(local.queue.rows) < (GROUPS - 1) * SAMPLES:
        await asyncio.sleep(0.01)
    counters = await controller.begin(state)
    assert (counters.admitted, counters.rolled_back, counters.in_flight) == (GROUPS, GROUPS, 0)
    assert not local.queue.rows and local.fleet.resets == 1
    assert controller._source.resumed_at == [(GROUPS, 1, 0)]  # that history
    local.fleet.held = set()
    await controller.set_version(1)
    batch = await controller.wait_batch(1, WAIT_S)
    assert batch.keys == keys_of(3, 4, 5) and batch.timings["total/groups_rolled_back"] == GROUPS


async def test_groups_that_a_killed_controller_started_count_as_rolled_back(
    local: LocalController, tmp_path: Path
) -> None:
    JournalFile(tmp_path / JOURNAL_FILE).count(17)
    state = {"admission": local.controller._admission.state_dict(), "source": {"seed": 0}}
    assert (await local.controller.begin(state)).rolled_back == 17
    await local.controller.set_version(0)
    assert groups_started(tmp_path / JOURNAL_FILE) == 17 + GROUPS
    await local.controller.shutdown()


async def test_other_prompts_than_the_saved_ones_are_refused(local: LocalController) -> None:
    state = await local.controller.state_dict() | {"source": {"seed": 1}}
    with pytest.raises(ValueError, match="saved prompts"):
        await local.controller.begin(state)


async def test_skipped_prompts_are_reported_once_in_a_history(local: LocalController) -> None:
    await local.controller.begin(None)
    skipped = []
    for step in range(2):
        await local.controller.set_version(step)
        skipped.append((await local.controller.wait_batch(step, WAIT_S)).timings["rollout/skipped_prompts"])
        await local.controller.commit(step, trained=3, filtered=0, dropped_stale=0, failed=0)
    assert skipped == [3, 0]
    await local.controller.begin(await local.controller.state_dict())
    await local.controller.set_version(2)
    assert (await local.controller.wait_batch(2, WAIT_S)).timings["rollout/skipped_prompts"] == 0


async def test_a_dead_queue_is_found_by_the_supervisors_heartbeat(local: LocalController) -> None:
    await local.controller.heartbeat()
    local.queue.failure = RolloutError("storage unit 0 of the trajectory queue has died")
    with pytest.raises(RolloutError, match="storage unit 0"):
        await local.controller.heartbeat()


async def test_a_trainer_that_waits_for_a_batch_is_told_that_no_replica_is_left(local: LocalController) -> None:
    controller, fleet = local.controller, local.fleet
    fleet.held = {1}
    await controller.begin(None)
    await controller.set_version(0)
    waiting = asyncio.create_task(controller.wait_batch(0, 60.0))
    await asyncio.sleep(0)
    fleet.needs_publication = "replica 0 has died"
    assert await waiting == PublicationNeeded("replica 0 has died")
    fleet.needs_publication = ""
    with pytest.raises(BatchNotReady):
        await controller.wait_batch(0, 0.1)
    assert fleet.publishes == [True]
    await controller.shutdown()


@pytest.mark.parametrize(
    "changes",
    [
        {"admission": {"mode": "one_step_off"}, "rollout": {"partial_rollout": False}},
        {"weight_sync": {"restarts": 0}},
    ],
    ids=["would wait for the responses", "would bring no replica"],
)
async def test_a_trainer_whose_publication_would_not_help_is_not_asked_for_one(
    changes: dict[str, Any], make: Make
) -> None:
    local = make(**changes)
    controller, fleet = local.controller, local.fleet
    fleet.held = set(range(20))
    await controller.begin(None)
    await controller.set_version(0)
    fleet.needs_publication = "replica 0 has died"
    with pytest.raises(BatchNotReady):
        await controller.wait_batch(0, 0.1)
    assert fleet.publishes == [False]
    await controller.shutdown()


async def test_an_evaluation_that_only_a_publication_can_save_is_given_up(local: LocalController) -> None:
    controller, fleet = local.controller, local.fleet
    running: list[asyncio.Task[Any] | None] = []

    async def endless(version: int, label: str) -> list[Any]:
        running.append(asyncio.current_task())
        await asyncio.Event().wait()
        return []

    controller._evaluations.run = endless  # type: ignore[method-assign]
    fleet.needs_publication = "replica 0 has died"
    alone = asyncio.create_task(controller.evaluate(0))
    await asyncio.sleep(0.7)
    assert not alone.done(), "nobody would publish: `megarl eval` has no trainer"
    alone.cancel()
    await controller.begin(None)
    assert await controller.evaluate(0) == PublicationNeeded("replica 0 has died")
    assert [task is not None and task.cancelled() for task in running] == [True, True]


def external(name: str) -> ExternalRequest:
    return ExternalRequest(GenerateRequest(name, [7, 7], SamplingSpec(4, 1.0, (2,))), name, 60.0)


async def external_ends(local: LocalController, *names: str, seen: int = 0) -> dict[str, ExternalNews]:
    """Wait for the ends of requests of the gateway."""
    ends: dict[str, ExternalNews] = {}
    while set(names) - ends.keys():
        seen, news, _ = await local.controller.take(seen, WAIT_S, "gateway")
        ends |= {each.name: each for each in news if each.ended}
    return ends


@pytest.mark.parametrize("announced", [False, True])
async def test_requests_of_the_gateway_wait_for_weights_and_for_engines_that_drop_everything(
    local: LocalController, announced: bool
) -> None:
    """Admission counts none of them."""
    controller = local.controller
    await controller.give(1, [external("early")], "gateway")
    await asyncio.sleep(0)
    assert "early" not in local.fleet.sent
    await controller.set_version(0, admit=False)
    assert (await external_ends(local, "early"))["early"].part.response_ids == [9, 9]
    local.fleet.held.add("held")
    await controller.give(2, [external("held")], "gateway")
    while "held" not in local.fleet.sent:
        await asyncio.sleep(0)
    local.fleet.held.clear()
    if announced:
        await controller.take_over(Failover(None, version=0, announced=1))
    else:
        await controller.begin(None)
    await controller.give(3, [external("later")], "gateway")
    assert "later" not in local.fleet.sent and len(local.fleet.sent["held"]) == 1
    await controller.set_version(1, admit=False)
    seen = controller._external.link._taken
    ended = await external_ends(local, "held", "later", seen=seen)
    assert {name: news.part.response_ids for name, news in ended.items()} == {"held": [9, 9], "later": [9, 9]}
    assert (await controller.counters()).admitted == 0


async def test_a_new_controller_serves_the_gateway_with_the_weights_that_the_engines_have(
    local: LocalController,
) -> None:
    await local.controller.give(1, [external("open")], "gateway")
    await local.controller.take_over(Failover(None, version=0))
    assert (await external_ends(local, "open"))["open"].part.response_ids == [9, 9]


async def test_a_controller_that_starts_refuses_the_gateway_for_now(local: LocalController) -> None:
    local.controller._external_requests = None
    with pytest.raises(RolloutError, match="still starting"):
        await local.controller.give(1, [], "gateway")
