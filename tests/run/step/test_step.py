"""A step: every group and every sample ends exactly once, and every option reaches what the updates train on."""

import collections
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.filters import without_signal
from megarl.algorithms.objective.stats import OriginGaps
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.derived import staleness
from megarl.config.derived.algorithm import shaping_of
from megarl.config.schema import Config
from megarl.queue.streams import OLD_LOGPROBS, SOURCES
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan, sample_key
from megarl.run.record.batch_metrics import record_batch
from megarl.run.step import step
from megarl.run.step.off_policy import StepMeasures
from megarl.run.step.plan import ReuseError, plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import NonFiniteError, NoTokensError
from tests.support.losses.loss_batches import LossSpec, loss_spec
from tests.support.losses.rl_problem import (
    CLIP,
    ENTROPY,
    padded_gradients,
)
from tests.support.losses.samples import advantage_of, full, with_streams
from tests.support.losses.step_problem import (
    GROUPS,
    PER_GROUP,
    REWARDS,
    by_group,
    make_step_problem,
    resampled,
    trajectory,
)
from tests.support.models.tensors import worst
from tests.support.trainer.trained_groups import trained_as_planned


def config(**sections: dict) -> Config:
    base = {
        "run": {"steps": 1},
        "model": {"path": "x"},
        "batch": {"groups": 4, "samples_per_group": 4},
        "sampling": {"max_tokens": 8},
        "data": {"path": "y"},
    }
    return Config.model_validate({key: base.get(key, {}) | sections.get(key, {}) for key in base | sections})


def tag(
    group: int,
    index: int,
    reward: float,
    *,
    tokens: int = 4,
    version: int = 0,
    status: str = "ok",
    finish: str = "stop",
) -> SampleTag:
    return SampleTag(sample_key(group, index), group, index, 3, tokens, tokens, version, finish, reward, {}, status)  # type: ignore[arg-type]


SAMPLES = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 8),
    st.sampled_from([3, 4]),
    st.sampled_from(["ok", "ok", "failed"]),
)


@given(
    groups=st.lists(st.lists(SAMPLES, min_size=2, max_size=5), max_size=6),
    dp_size=st.integers(1, 3),
    mini_batches=st.integers(1, 3),
)
@settings(deadline=None)
def test_every_sample_is_counted_once(groups: list, dp_size: int, mini_batches: int) -> None:
    tags = [
        tag(g, i, reward, tokens=tokens, version=version, status=status)
        for g, group in enumerate(groups)
        for i, (reward, tokens, version, status) in enumerate(group)
    ]
    plan = plan_step(tags, config(trainer={"mini_batches": mini_batches}), dp_size=dp_size, version=4)
    ended = {name: len(ids) for name, ids in plan.ended.items()}
    assert {name: getattr(plan.outcome, name) for name in ended} == ended
    assert sorted(group for ids in plan.ended.values() for group in ids) == sorted(plan.admitted)
    assert len(plan.admitted) == len(groups)
    placed = collections.Counter(key for rank in range(dp_size) for key in plan.keys_of(rank))
    trained = {sample.key for group in plan.shaped.groups for sample in group}
    assert set(placed) == trained and set(placed.values()) <= {1}
    for key in placed:
        assert plan.tags[key].status == "ok" and plan.tags[key].oldest_version == 4, "failed or stale sample trained"
    assert len(plan.mini_batches) == min(mini_batches, plan.outcome.trained)
    for part in plan.mini_batches:  # groups are whole within one update
        inside = {key.split(":")[0] for rank in part for key in rank}
        elsewhere = {k.split(":")[0] for other in plan.mini_batches if other is not part for r in other for k in r}
        assert not inside & elsewhere
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert values["batch/samples"] == len(tags)
    assert values["groups/trained"] == plan.outcome.trained


def test_the_plan_does_not_depend_on_the_order_of_the_tags() -> None:
    tags = [tag(g, i, float((g + i) % 2), tokens=1 + i) for g in range(4) for i in range(4)]
    plans = [plan_step(order, config(), dp_size=2, version=0) for order in (tags, tags[::-1])]
    assert plans[0].hash == plans[1].hash and plans[0].mini_batches == plans[1].mini_batches


def test_a_stale_token_keeps_its_group_from_the_update() -> None:
    tags = [tag(g, i, float(i % 2), version=3 if (g, i) == (1, 2) else 4) for g in range(3) for i in range(4)]
    plan = plan_step(tags, config(), dp_size=1, version=4)
    assert plan.outcome.dropped_stale == 1 and plan.outcome.trained == 2
    assert not any(key.startswith("1:") for key in plan.keys_of(0))


def test_permuted_rewards_keep_the_group_s_rewards_but_not_their_owners() -> None:
    tags = [tag(g, i, float(i)) for g in range(8) for i in range(4)]
    fair = plan_step(tags, config(), dp_size=1, version=0)
    control = plan_step(tags, config(algorithm={"permute_rewards": True}), dp_size=1, version=0)
    for honest, shuffled in zip(fair.shaped.groups, control.shaped.groups, strict=True):
        assert sorted(s.reward for s in honest) == sorted(s.reward for s in shuffled)
    assert fair.shaped.groups != control.shaped.groups


def test_permuted_rewards_leave_out_failed_samples() -> None:
    """A failed sample's 0 on one of the solved ones would make a group that has nothing to tell apart."""
    tags = [tag(g, i, float(i != g % 4), status="failed" if i == g % 4 else "ok") for g in range(8) for i in range(4)]
    plan = plan_step(tags, config(algorithm={"permute_rewards": True}), dp_size=1, version=0)
    assert plan.outcome.filtered == 8


def sets(*changes: dict[str, Any]) -> dict[str, Any]:
    """The section `data` with sets a, b, ..."""
    files = [{"name": name, "path": name, **change} for name, change in zip("abc", changes, strict=False)]
    return {"path": None, "sets": files}


def test_overlong_samples_are_punished_below_the_limit_of_their_own_set() -> None:
    """Sets of 8 and of 6 tokens: the last 4 of each are punished."""
    own = sets({}, {"sampling": {"max_tokens": 6}})
    overlong = {"buffer_tokens": 4, "penalty": 2.0}
    tags = [
        replace(tag(g, i, 1.0, tokens=tokens), dataset="ab"[g]) for g in range(2) for i, tokens in enumerate((2, 4, 6))
    ]
    plan = plan_step(
        tags, config(algorithm={"overlong": overlong, "filter_zero_variance": False}, data=own), dp_size=1, version=0
    )
    assert [[sample.reward for sample in group] for group in plan.shaped.groups] == [[1.0, 1.0, 0.0], [1.0, 0.0, -1.0]]


def test_samples_have_the_temperature_of_their_own_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step.parallel, "dp_rank", lambda: 0)
    own = config(data=sets({}, {"sampling": {"temperature": 0.5}}))
    rows = [
        Trajectory(g, i, [1], [5], [-0.1], (VersionSpan(0, 0, 1),), "stop", float(i), dataset="ab"[g])
        for g in range(2)
        for i in range(2)
    ]
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    samples = step.train_samples(plan, {row.key: row for row in rows}, own, 0)
    assert {key: sample.temperature for key, sample in samples.items()} == {
        "0:0": 1.0, "0:1": 1.0, "1:0": 0.5, "1:1": 0.5,
    }  # fmt: skip


class Unrouted:
    """A policy without experts."""

    def set_routes(self, samples: object, routes: object) -> None:
        pass


class FailsInItsUpdate(Unrouted):
    """A policy whose update number `failing` has a loss that is not finite."""

    def __init__(self, failing: int) -> None:
        self.failing, self.made = failing, 0
        self.trained_keys: list[str] = []

    def update(self, *arguments: object, **options: object) -> dict[str, float]:
        if self.made == self.failing:
            raise NonFiniteError("the loss is nan; no weight was changed")
        self.made += 1
        return {}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_tells_how_many_updates_the_step_has_made_before(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The session knows by this number whether weights have changed, so that the step cannot be skipped."""
    for name in ("record_measures", "record_update", "_add_logprobs"):
        monkeypatch.setattr(step, name, lambda *arguments: None)
    monkeypatch.setattr(step.parallel, "dp_rank", lambda: 0)
    own = config(trainer={"mini_batches": 2})
    rows = [
        Trajectory(g, i, [1], [5], [-0.1], (VersionSpan(0, 0, 1),), "stop", float(i))
        for g in range(2)
        for i in range(2)
    ]
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    policy: Any = FailsInItsUpdate(failing)
    with pytest.raises(NonFiniteError) as caught:
        step.train_step(policy, plan, {row.key: row for row in rows}, own, PhaseTimer(), step_metrics(), step=0)
    assert caught.value.updates == policy.made == failing


@pytest.mark.parametrize(("correction", "lag"), [("none", 1), ("token_tis", 0)])
def test_tokens_lag_by_the_updates_that_the_step_makes_before_their_own(correction: str, lag: int) -> None:
    """Unless a pass before the first update compares all of them."""
    admission = {"mode": "async", "max_staleness": 4}
    own = config(trainer={"mini_batches": 2}, admission=admission, algorithm={"correction": {"kind": correction}})
    rows = two_groups()
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    samples = step.train_samples(plan, {row.key: row for row in rows}, own, 0)
    buckets = SourceBuckets.of(own)
    found = [{int(samples[key].streams[SOURCES][0]) % buckets.lags for key in keys} for (keys,) in plan.mini_batches]
    assert found == [{0}, {lag}]


def test_demonstrations_are_not_compared_with_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine has scored them: their rows hold log-probs of zero."""
    monkeypatch.setattr("megarl.run.step.off_policy.parallel.dp_all_gather_object", lambda value, codec: [value])
    own, rows = config(), two_groups()
    rows[3:] = [replace(row, demonstrated=True, rollout_logprobs=[0.0], versions=()) for row in rows[3:]]
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    samples = step.train_samples(plan, {row.key: row for row in rows}, own, 0)
    for sample in samples.values():
        sample.streams[OLD_LOGPROBS] = torch.tensor([-0.1])
    measured = StepMeasures.begin(plan.tags.values(), SourceBuckets.of(own))
    measured.compare_in_pass(samples, {row.key: row for row in rows})
    assert measured.compared is not None and measured.compared["tokens"] == 3
    assert measured.compared["ratio_max"] == pytest.approx(1.0)


@pytest.mark.parametrize("empty", [{0}, {1}, {0, 1}])
def test_a_mini_batch_without_a_weight_makes_no_update(monkeypatch: pytest.MonkeyPatch, empty: set[int]) -> None:
    """The other one does, and is the first whose comparison with the engine's log-probs is watched."""
    compared: list[Any] = []
    watched: list[Any] = []
    monkeypatch.setattr(step, "record_update", lambda *arguments: None)
    monkeypatch.setattr(step, "record_measures", lambda *arguments: None)
    monkeypatch.setattr(step.StepMeasures, "compare_in_update", lambda self, values, gaps: compared.append(values))
    monkeypatch.setattr(step.parallel, "dp_rank", lambda: 0)
    monkeypatch.setattr(step.parallel, "dp_all_gather_object", lambda own, codec: [own])
    calls: list[bool] = []

    def update(samples: list[TrainSample], *arguments: Any, another_follows: bool, **options: Any) -> int:
        calls.append(another_follows)
        policy.trained_keys = [sample.key for sample in samples]
        if len(calls) - 1 in empty:
            raise NoTokensError("no token has a weight in any term of the loss")
        options["check"](len(calls))
        return len(calls)

    own, rows = config(trainer={"mini_batches": 2}), two_groups()
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    metrics = step_metrics()
    policy: Any = Unrouted()
    policy.update, policy.source_gaps = update, OriginGaps.zeros(0)
    keep = lambda plan, measured: watched.append(measured)  # noqa: E731
    by_key = {row.key: row for row in rows}
    trained = step.train_step(policy, plan, by_key, own, PhaseTimer(), metrics, step=0, watch=keep)
    assert calls == [True, False] and len(watched) == 1
    assert trained == {0, 1}, "a mini-batch without a weight has nothing left to train"
    assert metrics.reduce()["policy/updates"] == 2 - len(empty)
    assert compared == sorted({1, 2} - {number + 1 for number in empty})[:1]


def two_groups(**changes: Any) -> list[Trajectory]:
    return [
        Trajectory(g, i, [1], [5], [-0.1], (VersionSpan(0, 0, 1),), "stop", float(i), **changes)
        for g in range(2)
        for i in range(3)
    ]


def test_a_step_whose_engine_has_returned_a_bad_logprob_makes_no_update() -> None:
    rows = two_groups()
    rows[4] = replace(rows[4], rollout_logprobs=[float("nan")], status="failed", failure="log-prob nan")
    own = config()
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    assert plan.outcome.trained == 2, "the other samples could be trained"
    policy: Any = FailsInItsUpdate(0)
    message = r"the engines returned are not finite in 1 of 6 samples \(the first: sample 1:1\); no weight was changed"
    with pytest.raises(NonFiniteError, match=message):
        step.train_step(policy, plan, {row.key: row for row in rows}, own, PhaseTimer(), step_metrics(), step=0)
    skipped = plan.skipped()
    assert skipped is not None and skipped.outcome.failed == 2 and skipped.ended["failed"] == [0, 1]


class ReturnsNan(Unrouted):
    """A policy whose log-probs of one sample are not finite; an update would be an error."""

    def compute_logprobs(self, samples: list[TrainSample], *, reference: bool) -> list[torch.Tensor]:
        return [torch.tensor([float("nan") if sample.key == "1:2" else -0.1]) for sample in samples]


def test_a_bad_logprob_of_the_trainer_is_found_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later mini-batch, the loss would tell it after an update, when the step cannot be skipped any more."""
    monkeypatch.setattr(step.parallel, "dp_rank", lambda: 0)
    monkeypatch.setattr(step.parallel, "dp_all_gather_object", lambda own, codec: [own])
    rows, own = two_groups(), config(trainer={"mini_batches": 2}, algorithm={"old_logprobs": "trainer"})
    plan = plan_step([row.tag for row in rows], own, dp_size=1, version=0)
    policy: Any = ReturnsNan()
    message = (
        r"the log-probs \(old_logprobs\) that the trainer computed are not finite in 1 samples \(the first: sample 1:2"
    )
    with pytest.raises(NonFiniteError, match=message) as caught:
        step.train_step(policy, plan, {row.key: row for row in rows}, own, PhaseTimer(), step_metrics(), step=0)
    assert caught.value.updates == 0


def test_each_data_set_has_metrics_if_there_are_several() -> None:
    tags = [replace(tag(g, i, float(i), finish="length" if i else "stop"), dataset="ab"[g % 2])
            for g in range(3) for i in range(2)]  # fmt: skip
    tags[-1] = replace(tags[-1], status="failed")
    metrics = step_metrics()
    plan = plan_step(tags, config(data=sets({}, {})), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    values = {name: value for name, value in metrics.reduce().items() if name.startswith("data/")}
    assert values == {
        "data/a/groups": 2, "data/a/reward_mean": 1 / 3, "data/a/truncated_share": 1 / 3,
        "data/b/groups": 1, "data/b/reward_mean": 0.5, "data/b/truncated_share": 0.5,
    }  # fmt: skip
    plan = plan_step([tag(0, i, float(i)) for i in range(2)], config(), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    assert not any(name.startswith("data/") for name in metrics.reduce())


JUDGED = st.tuples(
    st.sampled_from([0.0, 1.0]),
    st.integers(5, 8),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(["ok", "failed"]),
)


@given(
    groups=st.lists(st.lists(JUDGED, min_size=2, max_size=4), min_size=1, max_size=6),
    truncated=st.sampled_from(["keep", "mask", "zero_reward"]),
    buffer=st.sampled_from([0, 3]),
    permute=st.booleans(),
)
@settings(deadline=None)
def test_rollout_replaces_exactly_the_groups_that_the_trainer_would_filter(
    groups: list, truncated: str, buffer: int, permute: bool
) -> None:
    chosen = config(
        algorithm={"permute_rewards": permute, "overlong": {"buffer_tokens": buffer}},
        sampling={"truncated": truncated},
        admission={"refill": True},
    )
    made = [
        [tag(g, i, reward, tokens=tokens, finish=finish, status=status) for i, (reward, tokens, finish, status) in each]
        for g, each in ((g, list(enumerate(group))) for g, group in enumerate(groups))
    ]
    replaced = [g for g, group in enumerate(made) if without_signal(group, shaping_of(chosen))]
    queued = [each for g, group in enumerate(made) if g not in replaced for each in group]
    filtering = plan_step([each for group in made for each in group], chosen, dp_size=1, version=0)
    refilled = plan_step(queued, chosen, dp_size=1, version=0, replaced=replaced)
    assert refilled.shaped.filtered_groups == 0 and refilled.outcome == filtering.outcome
    assert refilled.mini_batches == filtering.mini_batches


def test_reports_of_replaced_groups_that_cannot_be_right_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "REFILL_LIMIT", 1)
    tags = [tag(0, i, float(i)) for i in range(2)]
    refill = config(admission={"refill": True})
    for replaced in ([0], [5, 5]):
        with pytest.raises(ValueError, match="in the batch or were reported twice"):
            plan_step(tags, refill, dp_size=1, version=0, replaced=replaced)
    with pytest.raises(ValueError, match=r"5 groups were replaced before a step; admission.refill allows 4"):
        plan_step(tags, refill, dp_size=1, version=0, replaced=range(5, 10))
    with pytest.raises(ValueError, match="allows 0"):
        plan_step(tags, config(), dp_size=1, version=0, replaced=[5])


REUSING = {"mode": "async", "sync_interval": 1, "max_staleness": 3, "max_uses": 2}


def test_groups_that_are_used_again_are_trained_like_others_and_have_ended_already() -> None:
    """Groups 2 and 5 were trained before; of the new ones 6 is filtered and 7 too old."""
    rewards = {2: (0.0, 2.0), 5: (1.0, 0.0), 6: (1.0, 1.0), 7: (0.0, 1.0), 8: (0.0, 1.0), 9: (1.0, 0.0)}
    versions = {2: 4, 5: 5, 7: 3}
    tags = [
        replace(tag(g, i, reward, tokens=g, version=versions.get(g, 6)), dataset="a")
        for g, each in rewards.items()
        for i, reward in enumerate(each)
    ]
    own = config(admission=REUSING)
    plan = plan_step(tags, own, dp_size=2, version=7, reused=[5, 2])
    as_new = plan_step(tags, own, dp_size=2, version=7)
    assert plan.mini_batches == as_new.mini_batches and plan.shaped == as_new.shaped
    outcome = plan.outcome
    assert (outcome.trained, outcome.filtered, outcome.dropped_stale, outcome.failed) == (2, 1, 1, 0)
    assert (plan.admitted, outcome.reused, plan.trained_groups) == ({6, 7, 8, 9}, 2, [8, 9])
    assert plan.ended == {"trained": [8, 9], "filtered": [6], "dropped_stale": [7], "failed": []}
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    step.set_advantages(plan, {}, {}, own.algorithm, metrics)
    values = metrics.reduce()
    assert (values["groups/admitted"], values["groups/trained"], values["groups/reused"]) == (4, 2, 2)
    assert values["batch/samples"] == 12 and values["batch/trained_samples"] == 8
    assert values["batch/response_tokens"] == 2 * (2 + 5 + 6 + 7 + 8 + 9) and values["batch/reused_tokens"] == 2 * 7
    assert values["batch/length_mean"] == 6 and values["batch/staleness_max"] == 3
    # What was generated and scored for this step
    assert values["reward/mean"] == pytest.approx(5 / 8) and values["groups/solve_all"] == 1 / 4
    assert values["reward/max"] == 1.0 and values["reward/shaped_mean"] == 0.5
    assert values["rollout/response_length_mean"] == 7.5 and values["rollout/version_lag_max"] == 4
    assert (values["data/a/groups"], values["data/a/reward_mean"]) == (4, pytest.approx(5 / 8))


def test_the_kl_of_a_sample_is_that_of_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the KL in the reward a sample that is split has the advantage of the whole one; all parts carry it."""
    monkeypatch.setattr(step.parallel, "dp_all_gather_object", lambda own, codec: [own])
    own = config(algorithm={"kl": {"coef": 0.5, "where": "reward", "estimator": "k1"}, "advantage": "dr_grpo"})

    def row(
        key: tuple[int, int, int], reward: float, old: list[float], mask: list[int] | None = None
    ) -> tuple[Trajectory, TrainSample]:
        ids = [5] * len(old)
        made = Trajectory(
            key[0], key[1], [1], ids, old, (VersionSpan(0, 0, len(old)),), "stop", reward, part=key[2],
            response_mask=mask,
        )  # fmt: skip
        sample = TrainSample.of(made)
        sample.streams |= {"old_logprobs": torch.tensor(old), "reference_logprobs": torch.zeros(len(old))}
        return made, sample

    def advantages(*made: tuple[Trajectory, TrainSample]) -> dict[str, float]:
        rows, samples = {each.key: each for each, _ in made}, {each.key: sample for each, sample in made}
        plan = plan_step([each.tag for each in rows.values()], own, dp_size=1, version=0)
        assert sorted(plan.keys_of(0)) == sorted(rows)
        step.set_advantages(plan, samples, rows, own.algorithm, step_metrics())
        return {key: advantage_of(sample) for key, sample in samples.items()}

    whole = advantages(row((0, 0, 0), 1.0, [-1.0, -2.0, -4.0]), row((0, 1, 0), 0.0, [-1.0]))
    split = advantages(
        row((0, 0, 0), 1.0, [-1.0]), row((0, 0, 1), 1.0, [-2.0, -4.0]), row((0, 1, 0), 0.0, [-1.0])
    )  # fmt: skip
    assert split == {"0:0": whole["0:0"], "0:0.1": whole["0:0"], "0:1": whole["0:1"]}
    # What a tool has answered costs no KL.
    masked = advantages(row((0, 0, 0), 1.0, [-1.0, -7.0, -6.0], [1, 0, 1]), row((0, 1, 0), 0.0, [-1.0]))
    assert masked == whole
    assert whole["0:0"] == pytest.approx(((1.0 + 3.5) - 0.5) / 2)


def test_the_trained_groups_of_a_step_that_is_skipped_have_failed() -> None:
    """Both by name, as the commit reports them, and by number, as the metrics do."""
    rewards = {2: (0.0, 2.0), 5: (1.0, 0.0), 6: (1.0, 1.0), 7: (0.0, 1.0)}
    tags = [
        tag(g, i, reward, version=0 if g == 7 else 6) for g, each in rewards.items() for i, reward in enumerate(each)
    ]
    plan = plan_step(tags, config(), dp_size=2, version=6)
    assert plan.ended == {"trained": [2, 5], "filtered": [6], "dropped_stale": [7], "failed": []}
    skipped = plan.skipped()
    assert skipped is not None and skipped.keys_of(0) == []
    assert skipped.ended == {"trained": [], "filtered": [6], "dropped_stale": [7], "failed": [2, 5]}
    assert {name: getattr(skipped.outcome, name) for name in skipped.ended} == {
        name: len(groups) for name, groups in skipped.ended.items()
    }


@pytest.mark.parametrize(
    ("rewards", "version", "reused", "message"),
    [
        ((0.0, 1.0), 3, [1], "group 1 was trained by an earlier step .* but is too old for this step"),
        ((1.0, 1.0), 4, [1], "group 1 .* but has no signal or too few usable samples"),
        ((0.0, 1.0), 4, [1, 5], r"not in the batch or appear twice: \[1, 5\]"),
        ((0.0, 1.0), 4, [1, 1], r"not in the batch or appear twice: \[1, 1\]"),
    ],
)
def test_a_group_that_cannot_be_used_again_is_an_error(
    rewards: tuple[float, float], version: int, reused: list[int], message: str
) -> None:
    tags = [tag(1, i, reward, version=version) for i, reward in enumerate(rewards)]
    tags += [tag(2, i, float(i), version=6) for i in range(2)]
    with pytest.raises(ReuseError, match=message):
        plan_step(tags, config(admission=REUSING), dp_size=1, version=7, reused=reused)
    with pytest.raises(ReuseError, match=r"groups \[2\] were reported as used again, but admission.max_uses is 1"):
        plan_step(tags, config(admission=REUSING | {"max_uses": 1}), dp_size=1, version=7, reused=[2])


def test_lengths_of_what_was_too_old_and_the_staleness_of_what_was_not() -> None:
    """Two updates of one group each, from version 4; the third group is too old, the longest, and reported."""
    lags = config(trainer={"mini_batches": 2}, admission={"mode": "async", "sync_interval": 2, "max_staleness": 3})
    versions, lengths = (2, 4, 1), (3, 5, 8)
    tags = [tag(g, i, float(i), tokens=lengths[g] - i, version=versions[g]) for g in range(3) for i in range(2)]
    tags.append(tag(2, 2, 0.0, tokens=7, status="failed", version=1))
    plan = plan_step(tags, lags, dp_size=1, version=4)
    assert plan.outcome.dropped_stale == 1 and plan.stale == ["2:0", "2:1", "2:2"]
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert (values["batch/stale_length_mean"], values["batch/stale_length_max"]) == (7.5, 8)
    assert (values["batch/length_mean"], values["batch/length_max"]) == (3.5, 5)
    # 4 - 2 for the first update, 5 - 4 for the second.
    assert (values["batch/staleness_mean"], values["batch/staleness_max"], values["batch/staleness_p95"]) == (1.5, 2, 2)


def test_no_lengths_are_reported_of_groups_that_were_not_dropped() -> None:
    metrics = step_metrics()
    plan = plan_step([tag(0, i, float(i)) for i in range(2)], config(), dp_size=1, version=0)
    record_batch(metrics, plan, trained_as_planned(plan))
    assert not any("stale_length" in name for name in metrics.reduce())


KL = 0.4


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, TrainSample]]:
    """A tiny model and samples of four groups, whose reference log-probs are the model's own."""
    return make_step_problem(tmp_path_factory.mktemp("step"))


def kl_of(sample: TrainSample, estimator: str) -> float:
    """KL of the whole response, from the log-probs that sampled it."""
    ratio = (sample.streams["reference_logprobs"].double() - sample.streams["old_logprobs"].double()).exp()
    return float({"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log()}[estimator].sum())


STEPS = {
    "kl in the loss": {"algorithm__kl": {"coef": KL}},
    "k1 in the reward": {"algorithm__kl": {"coef": KL, "where": "reward", "estimator": "k1"}},
    "k2 in the reward, rloo": {
        "algorithm__kl": {"coef": KL, "where": "reward", "estimator": "k2"},
        "algorithm__advantage": "rloo",
    },
    "k3 in the reward, dr_grpo, unfiltered": {
        "algorithm__kl": {"coef": KL, "where": "reward", "estimator": "k3"},
        "algorithm__advantage": "dr_grpo",
        "algorithm__filter_zero_variance": False,
    },
    # The proximal policy is the model itself: the log-probs of the samples are those of the policy that sampled.
    "corrected": {
        "admission__mode": "one_step_off",
        "algorithm__kl": {"coef": KL, "where": "reward", "estimator": "k2"},
    },
    "corrected, two updates": {
        "admission__mode": "one_step_off",
        "sampling__truncated": "mask",
        "trainer__mini_batches": 2,
        "algorithm__kl": {"coef": KL},
        "algorithm__correction": {"cap": 1.1},
    },
    "masked, two updates": {"sampling__truncated": "mask", "trainer__mini_batches": 2, "algorithm__kl": {"coef": KL}},
}


@pytest.mark.world
@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_updates_of_a_step(
    world: Callable[[int], Any], problem: tuple[Path, dict[str, TrainSample]], ranks: int, case: str
) -> None:
    model_dir, samples = problem
    changes = STEPS[case]
    got = world(ranks).run(
        "tests.support.ranks.training.step:stepped",
        model_dir=model_dir,
        rows=[trajectory(sample) for sample in samples.values()],
        **changes,
    )
    expected, spec = expected_updates(samples, changes)
    assert all(len(part["updates"]) == len(expected) == part["metrics"]["policy/updates"] for part in got)
    for number, update in enumerate(expected):
        seen = {key: value for part in got for key, value in part["updates"][number].items()}
        assert seen.keys() == update.keys()
        for key, sample in update.items():
            assert seen[key] == (pytest.approx(advantage_of(sample), rel=1e-4, abs=1e-4), sample.trained_tokens)
    _, gradients = padded_gradients(model_dir, list(expected[0].values()), spec)
    merged = {name: value for part in got for name, value in part["gradients"].items()}
    assert worst(merged, gradients) <= 1e-4


def weighted(number: int, row: Trajectory) -> Trajectory:
    """Every third row brings weights; of the others, every second one has tokens that the model did not sample."""
    size = len(row.response_ids)
    if number % 3 == 0:
        streams = {"rl_weights": [float(t % 2) for t in range(size)], "ce_weights": [0.5] * size}
        return replace(row, streams=streams)
    return replace(row, response_mask=[int(number % 2 == 0 or t % 3 != 1) for t in range(size)])


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_rows_and_of_the_config_reach_the_updates(
    world: Callable[[int], Any], problem: tuple[Path, dict[str, TrainSample]], ranks: int
) -> None:
    """With one's own loss and advantage; each term counts its own tokens."""
    model_dir, samples = problem
    rows = [weighted(number, trajectory(sample)) for number, sample in enumerate(samples.values())]
    changes = {
        "algorithm__ce": {"tokens": "observations", "coef": 0.1},
        "algorithm__loss": "examples.tutorials.own_loss.topr:topr",
        "algorithm__advantage": "examples.tutorials.own_loss.topr:above_median",
        "algorithm__loss_options": {},
        "algorithm__kl": {"coef": KL},
        "sampling__truncated": "mask",  # the last sample of each group
        "trainer__mini_batches": 2,
    }
    got = world(ranks).run("tests.support.ranks.training.step:stepped", model_dir=model_dir, rows=rows, **changes)
    trained = [row for row in rows if row.group_id != 2 and row.sample_index != PER_GROUP - 1]
    sampled = [sum(row.response_mask) for row in trained]
    in_rl = [int(sum(row.streams["rl_weights"])) if row.streams else sum(row.response_mask) for row in trained]
    expected = {
        "policy/tokens": sum(in_rl),
        "policy/ref_kl_tokens": sum(sampled),
        "policy/ce_tokens": sum(
            len(row.response_ids) if row.streams else row.response_mask.count(0) for row in trained
        ),
    }
    metrics = got[0]["metrics"]
    assert {name: metrics[name] for name in expected} == expected
    values = {value for part in got for update in part["updates"] for value, _ in update.values()}
    assert values == {0.0, 1.0, -1.0, -0.5, 0.5}  # rewards minus the median of their group


def in_two_turns(row: Trajectory) -> Trajectory:
    """The second half of a row is another turn; only the first turns of the first samples of a group have a reward."""
    rewards = [float(row.sample_index == 0), 0.0]
    return replace(row, turn_rewards=rewards, turn_starts=[0, len(row.response_ids) // 2])


@pytest.mark.world
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tokens_of_each_turn_are_trained_with_its_own_advantage(
    world: Callable[[int], Any], problem: tuple[Path, dict[str, TrainSample]], ranks: int
) -> None:
    """So are those of group 2, whose outcomes are equal. The gradients are those of each token's own advantage."""
    model_dir, samples = problem
    rows = [in_two_turns(trajectory(sample)) for sample in samples.values()]
    changes = {"algorithm__advantage": "mt_grpo", "algorithm__kl": {"coef": KL}}
    run = partial(world(ranks).run, "tests.support.ranks.training.step:stepped", model_dir=model_dir)
    got = run(rows=rows, **changes)
    first = by_group([1.0, 0.0, 0.0], "grpo")
    expected, turns = {}, []
    for row in rows:
        outcome = by_group(REWARDS[row.group_id], "grpo")[row.sample_index]
        early = torch.arange(len(row.response_ids)) < len(row.response_ids) // 2
        of_turns = (outcome + first[row.sample_index], outcome)
        expected[row.key] = [of_turns[0] if each else of_turns[1] for each in early]
        # The mean over tokens is linear in them: a turn is a sample whose other tokens are masked.
        for mask, value in zip((early, ~early), of_turns, strict=True):
            sample = replace(samples[row.key], loss_mask_R=mask)
            turns.append(with_streams(sample, advantages=full(sample, value)))
    seen = {key: values for part in got for key, values in part["by_token"].items()}
    assert seen.keys() == expected.keys()
    for key, values in seen.items():
        assert values == pytest.approx(expected[key], rel=1e-6) and len(set(values)) == 2
    spec = loss_spec(clip_low=CLIP, clip_high=CLIP, kl_coef=KL, entropy_coef=ENTROPY)
    _, gradients = padded_gradients(model_dir, turns, spec)
    assert worst({name: value for part in got for name, value in part["gradients"].items()}, gradients) <= 1e-4


@pytest.mark.world
@pytest.mark.parametrize("updates", [1, 2])
def test_a_correction_reports_its_weights_and_the_same_mismatch(
    world: Callable[[int], Any], problem: tuple[Path, dict[str, TrainSample]], updates: int
) -> None:
    """The difference of the engine's log-probs does not depend on who corrects for it."""
    model_dir, samples = problem
    rows = [trajectory(sample) for sample in samples.values()]

    def metrics(**changes: Any) -> dict[str, float]:
        run = world(2).run("tests.support.ranks.training.step:stepped", model_dir=model_dir, rows=rows, **changes)
        return run[0]["metrics"]

    plain = metrics(algorithm__old_logprobs="trainer" if updates > 1 else "rollout", trainer__mini_batches=updates)
    cap = {"kind": "token_tis", "cap": 1.1}
    corrected = metrics(algorithm__correction=cap, trainer__mini_batches=updates)
    names = [name for name in plain if name.startswith("mismatch/")]
    assert len(names) == 7 + 4 and plain["mismatch/logprob_abs_diff_mean"] > 0.1
    assert {name: corrected[name] for name in names} == pytest.approx({name: plain[name] for name in names}, rel=1e-5)
    assert not [name for name in plain if name.startswith("correction/")]
    used = [s for key, s in samples.items() if not key.startswith("2:")]  # group 2 has no variance
    ratios = torch.cat([s.streams["reference_logprobs"] - s.streams["old_logprobs"] for s in used]).double().exp()
    weights = ratios.clamp(max=1.1)
    assert 0.1 < (capped := float((ratios > 1.1).double().mean())) < 0.9
    assert corrected["correction/weight_mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert corrected["correction/capped_share"] == pytest.approx(capped, rel=1e-5)
    if updates == 1:
        expected = float(weights.sum() ** 2 / len(weights) / weights.square().sum())
        assert corrected["correction/ess"] == pytest.approx(expected, rel=1e-5)
        assert corrected["policy/ratio_max"] == 1.0 and corrected["policy/clip_fraction"] == 0.0


@pytest.mark.world
@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, [True, False]),  # of the mini-batch whose weights sampled
        ({"algorithm__entropy_coef": 0.1}, [True, True]),
    ],
    ids=["shown", "in the loss"],
)
def test_entropy_is_computed_where_it_is_shown_or_weighed(
    world: Callable[[int], Any],
    problem: tuple[Path, dict[str, TrainSample]],
    changes: dict[str, Any],
    measured: list[bool],
) -> None:
    model_dir, samples = problem
    [got] = world(1).run(
        "tests.support.ranks.training.step:stepped",
        model_dir=model_dir,
        rows=[trajectory(sample) for sample in samples.values()],
        **{"trainer__mini_batches": 2, "algorithm__entropy_coef": 0.0} | changes,
    )
    assert got["entropy"] == got["computed"] == measured
    assert ("policy/entropy" in got["metrics"]) == any(measured)


def expected_updates(
    samples: dict[str, TrainSample], changes: dict[str, Any]
) -> tuple[list[dict[str, TrainSample]], LossSpec]:
    """Samples of each update with their advantages and masks, and the objective."""
    kl = changes["algorithm__kl"]
    in_reward = kl.get("where") == "reward"
    groups = [g for g in range(GROUPS) if g != 2 or not changes.get("algorithm__filter_zero_variance", True)]
    updates = changes.get("trainer__mini_batches", 1)
    parts = [groups[len(groups) * u // updates : len(groups) * (u + 1) // updates] for u in range(updates)]
    result = []
    for part in parts:
        update = {}
        for group in part:
            members = [samples[sample_key(group, index)] for index in range(PER_GROUP)]
            rewards = [
                reward - (KL * kl_of(sample, kl["estimator"]) if in_reward else 0.0)
                for sample, reward in zip(members, REWARDS[group], strict=True)
            ]
            advantages = by_group(rewards, changes.get("algorithm__advantage", "grpo"))
            for index, (sample, advantage) in enumerate(zip(members, advantages, strict=True)):
                masked = changes.get("sampling__truncated") == "mask" and index == PER_GROUP - 1
                mask = torch.zeros(len(sample.response_ids), dtype=torch.bool) if masked else None
                update[sample.key] = with_streams(replace(sample, loss_mask_R=mask), advantages=full(sample, advantage))
        result.append(update)
    in_loss = 0.0 if in_reward else KL
    correction = None
    if changes.get("admission__mode") == "one_step_off":
        correction = CorrectionSpec("token_tis", changes.get("algorithm__correction", {}).get("cap", 2.0))
        result = [{key: resampled(sample) for key, sample in update.items()} for update in result]
    return result, loss_spec(
        clip_low=CLIP, clip_high=CLIP, kl_coef=in_loss, entropy_coef=ENTROPY, correction=correction
    )


def test_demonstrations_are_never_stale_and_never_filtered() -> None:
    """No weights have made them, and their rewards are all 0."""
    made = config(algorithm={"filter_zero_variance": True})
    tags = [tag(group, index, 0.0, version=-1) for group in (0, 1) for index in (0, 1)]
    shown = [replace(each, demonstrated=each.group_id == 0) for each in tags]
    plan = plan_step(shown, made, dp_size=1, version=9)
    assert (plan.outcome.trained, plan.outcome.dropped_stale, plan.outcome.filtered) == (1, 1, 0)
    assert sorted(plan.keys_of(0)) == ["0:0", "0:1"] and plan.ended["trained"] == [0]
    metrics = step_metrics()
    record_batch(metrics, plan, trained_as_planned(plan))
    values = metrics.reduce()
    assert values["batch/demonstrations"] == 2 and values["batch/trained_samples"] == 2
    assert "reward/mean" in values and values["rollout/version_lag_max"] == 10, "those of the stale group alone"
