"""One training step, from the tags of a batch to an updated policy, without any process besides the trainer's ranks.

`plan_step` is pure: every rank computes the same plan from the same tags without communication, and the ranks compare
its hash. `train_step` needs only a policy and this rank's rows; the training loop and `megarl replay` share it.

Shapes: `_R` the response tokens of one sample.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from megarl.algorithms.aggregation import GlobalCounts
from megarl.algorithms.filters import ShapedBatch, alive_samples, shape_batch, with_advantages
from megarl.algorithms.kl import kl_penalty
from megarl.common.object_collectives import Codec, codec_of
from megarl.common.sample_parts import by_sample, first_parts
from megarl.config.algorithm import advantage_of
from megarl.config.datasets import own_temperatures, response_limits
from megarl.config.old_logprobs import (
    correction_of,
    interpolates_proximal,
    logprob_passes,
    recomputes_old_logprobs,
    teacher_passes,
)
from megarl.config.pace import pace_of, refill_groups
from megarl.config.schema import Config
from megarl.config.shaping import shaping_of
from megarl.config.training_loss import default_weights
from megarl.queue.streams import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROLLOUT_LOGPROBS,
    SOURCES,
    TEACHER_LOGPROBS,
)
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.run.compare_logprobs import StepMeasures
from megarl.run.distill import add_teacher_logprobs, distil
from megarl.run.early_logprobs import EarlyLogprobs
from megarl.run.off_policy import reject_before_updates, set_interpolation
from megarl.run.sources import TokenSources
from megarl.run.update_metrics import record_measures, record_update
from megarl.telemetry import events
from megarl.telemetry.metrics import StepMetrics
from megarl.telemetry.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.packed_batch import PackedBatch, PackedStep
from megarl.trainer.packing import assign_to_ranks, partition_hash
from megarl.trainer.policy import NonFiniteError, NoTokensError, Policy, StepRefused

T = TypeVar("T")

_KEYS: Codec[list[str]] = codec_of(list[str])
_SUMS: Codec[dict[str, float]] = codec_of(dict[str, float])


class ReuseError(ValueError):
    """A group that an earlier step has trained cannot be trained again."""


@dataclass(frozen=True)
class GroupOutcome:
    """Numbers of groups by how they ended; every admitted group ends in exactly one of the first four ways.

    `reused`: groups that an earlier step has trained, which thereby have ended, and that this one trains again.
    """

    trained: int
    filtered: int
    dropped_stale: int
    failed: int
    reused: int = 0


@dataclass(frozen=True)
class StepPlan:
    """The samples that a step trains on. `mini_batches[m][d]`: keys of the samples of mini-batch m on DP rank d.

    `tags`: those of all samples of the batch by key; `version`: the version of the weights that the step updates;
    `stale`: keys of the samples of groups that were dropped as stale; `reused`: ids of the groups that an earlier step
    has trained; `replaced`: ids of the groups without signal that rollout replaced before the batch; `not_finite`: ids
    of the groups that the step would have trained, if their loss or gradient were finite.
    """

    tags: dict[str, SampleTag]
    shaped: ShapedBatch
    mini_batches: list[list[list[str]]]
    outcome: GroupOutcome
    version: int
    stale: list[str] = field(default_factory=list)
    reused: frozenset[int] = frozenset()
    replaced: frozenset[int] = frozenset()
    not_finite: frozenset[int] = frozenset()

    @property
    def admitted(self) -> frozenset[int]:
        """The ids of the groups that the step settles, as the rollout side has named them."""
        return frozenset(tag.group_id for tag in self.new_tags) | self.replaced

    @property
    def ended(self) -> dict[str, list[int]]:
        """The same ids by how the groups ended, each list sorted; found without the numbers in `outcome`."""
        stale = {self.tags[key].group_id for key in self.stale}
        usable = Counter(tag.group_id for tag in first_parts(self.new_tags) if not tag.failed)
        trained = set(self.trained_groups)
        failed = {group for group in self.admitted - self.replaced if usable[group] < 2} | self.not_finite
        filtered = self.admitted - trained - stale - failed
        ends = {"trained": trained, "filtered": filtered, "dropped_stale": stale, "failed": failed}
        return {name: sorted(groups) for name, groups in ends.items()}

    @property
    def new_tags(self) -> list[SampleTag]:
        """The tags of the samples that no earlier step has trained."""
        return [tag for tag in self.tags.values() if tag.group_id not in self.reused]

    @property
    def trained_groups(self) -> list[int]:
        """The ids of the groups that this step is the first to train, sorted."""
        groups = {self.tags[sample.key].group_id for group in self.shaped.groups for sample in group}
        return sorted(groups - self.reused)

    def skipped(self) -> StepPlan | None:
        """Return the plan of the same batch with nothing to train, whose groups have failed.

        None if it trains groups that an earlier step has trained: these cannot fail any more.
        """
        if self.reused:
            return None
        outcome = replace(self.outcome, trained=0, failed=self.outcome.failed + self.outcome.trained)
        shaped = replace(self.shaped, groups=[], trained_groups=0)
        lost = frozenset(self.trained_groups)
        return replace(self, shaped=shaped, mini_batches=[], outcome=outcome, not_finite=lost)

    def keys_of(self, dp_rank: int) -> list[str]:
        """Return the keys of the rows that a DP rank must fetch, in the order in which it trains on them."""
        return [key for mini_batch in self.mini_batches for key in mini_batch[dp_rank]]

    @property
    def hash(self) -> str:
        """A digest of the assignment, which all ranks compare."""
        return partition_hash(self.mini_batches)


# Is shown the plan of a step and what was measured, once a step, on every rank. It may raise StepRefused.
StepWatch = Callable[[StepPlan, StepMeasures], None]


def plan_step(
    tags: Sequence[SampleTag],
    config: Config,
    *,
    dp_size: int,
    version: int,
    replaced: Sequence[int] = (),
    reused: Sequence[int] = (),
) -> StepPlan:
    """Shape rewards, filter groups, split the rest by groups into mini-batches and each of these by tokens over DP.

    `version`: the version of the weights about to be updated. A group with two usable samples or more is dropped if the
    last update of the step would pass the bound on the staleness of its oldest token. `replaced`: ids of the groups
    without signal that rollout replaced before this batch; they count as filtered. `reused`: ids of the groups of the
    batch that an earlier step has trained; they are trained like the others, and have ended already. Raises ValueError
    if a sample or a group appears twice, and ReuseError if one of `reused` cannot be trained.
    """
    pace = pace_of(config)
    _check_replaced(tags, config, replaced)
    _check_reused(tags, config, reused)
    oldest = version + pace.updates_per_step - 1 - pace.max_staleness
    groups = [
        list(group)
        for _, group in itertools.groupby(
            sorted(tags, key=lambda tag: (tag.group_id, tag.sample_index, tag.part)), key=lambda tag: tag.group_id
        )
    ]
    # A group with too few usable samples has failed on the rollout side already, however old its tokens are.
    usable = [alive_samples(group) for group in groups]
    in_time = [len(alive) < 2 or _oldest_version(alive, otherwise=version) >= oldest for alive in usable]
    stale = list(itertools.compress(groups, [not each for each in in_time]))
    fresh, limits = list(itertools.compress(groups, in_time)), response_limits(config)
    own_limits = [limits[group[0].dataset] for group in fresh] if limits else None
    shaped = shape_batch(fresh, shaping_of(config), advantage_of(config), own_limits)
    by_key = {tag.key: tag for tag in tags}
    _check_all_trained(reused, {by_key[group[0].key].group_id for group in shaped.groups}, stale)
    mini_batches = []
    for chunk in _chunks(shaped.groups, config.trainer.mini_batches):
        keys = [sample.key for group in chunk for sample in group]
        lengths = [by_key[key].total_tokens for key in keys]
        mini_batches.append([[keys[i] for i in part] for part in assign_to_ranks(lengths, dp_size)])
    outcome = GroupOutcome(
        trained=shaped.trained_groups - len(reused),
        filtered=shaped.filtered_groups + len(replaced),
        dropped_stale=len(stale),
        failed=shaped.failed_groups,
        reused=len(reused),
    )
    stale_keys = [tag.key for group in stale for tag in group]
    return StepPlan(by_key, shaped, mini_batches, outcome, version, stale_keys, frozenset(reused), frozenset(replaced))


def _oldest_version(samples: Sequence[Sequence[SampleTag]], *, otherwise: int) -> int:
    """Return the version of the oldest token; `otherwise` for demonstrations, which no weights have made."""
    versions = (tag.oldest_version for rows in samples for tag in rows if not tag.demonstrated)
    return min(versions, default=otherwise)


def _check_replaced(tags: Sequence[SampleTag], config: Config, replaced: Sequence[int]) -> None:
    """Check the rollout side's report of replaced groups. Raises ValueError for ids that cannot be right."""
    twice = set(replaced) & {tag.group_id for tag in tags}
    if twice or len(set(replaced)) != len(replaced):
        raise ValueError(f"groups were reported as replaced that are in the batch or were reported twice: {replaced}")
    if len(replaced) > (limit := refill_groups(config)):
        raise ValueError(f"{len(replaced)} groups were replaced before a step; admission.refill allows {limit}")


def _check_reused(tags: Sequence[SampleTag], config: Config, reused: Sequence[int]) -> None:
    """Check the rollout side's report of groups that are used again. Raises ReuseError for ids that cannot be right."""
    missing = set(reused) - {tag.group_id for tag in tags}
    if missing or len(set(reused)) != len(reused):
        raise ReuseError(f"groups were reported as used again that are not in the batch or appear twice: {reused}")
    if reused and config.admission.max_uses == 1:
        raise ReuseError(f"groups {list(reused)} were reported as used again, but admission.max_uses is 1")


def _check_all_trained(reused: Sequence[int], trained: Set[int], stale: Sequence[Sequence[SampleTag]]) -> None:
    """Raise ReuseError unless the step trains all groups that are used again, as an earlier step did."""
    if lost := sorted(set(reused) - trained):
        too_old = lost[0] in {group[0].group_id for group in stale}
        ended = "is too old for this step" if too_old else "has no signal or too few usable samples"
        raise ReuseError(f"group {lost[0]} was trained by an earlier step and is to be trained again, but {ended}")


def _chunks(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split `items` into at most `parts` contiguous runs of nearly equal size, none empty."""
    parts = min(parts, len(items))
    bounds = [len(items) * part // parts for part in range(parts + 1)] if parts else []
    return [list(items[start:end]) for start, end in itertools.pairwise(bounds)]


def train_step(
    policy: Policy,
    plan: StepPlan,
    rows: Mapping[str, Trajectory],
    config: Config,
    timer: PhaseTimer,
    metrics: StepMetrics,
    *,
    step: int,
    early: EarlyLogprobs | None = None,
    packed: PackedStep | None = None,
    watch: StepWatch = lambda plan, measured: None,
) -> None:
    """Compute the log-probs that are missing, then make one optimizer update per mini-batch. Collective.

    `rows`: this DP rank's trajectories by key, at least those of `plan.keys_of(dp_rank)`. `step`: the number of steps
    before this one. `early`: log-probs of this rank's samples that are there already. `packed`: these samples, packed
    on every rank; None: the step makes and packs them, with equal results. `watch` is called before the first update
    changes a weight.

    Records `policy/*`, `correction/*`, `mismatch/*` and `reward/shaped_mean`. A mini-batch without a weight in any term
    of the loss makes no update; a step whose groups are all filtered makes none, and records `policy/updates` 0. Raises
    NonFiniteError before any weight has changed, also if an engine has returned a log-prob that is not finite: its
    weights, or its arithmetic, may be damaged; and what `watch` raises.
    """
    _refuse_bad_logprobs(plan)
    recomputes = recomputes_old_logprobs(config)
    packed = packed or PackedStep(train_samples(plan, rows, config, parallel.dp_rank()))
    samples = packed.samples
    passes = logprob_passes(config) if plan.mini_batches else []
    with timer.phase("logprobs"):
        for stream in passes:
            _compute_logprobs(policy, packed, stream, early or EarlyLogprobs())
        used = {key: plan.tags[key] for part in plan.mini_batches for keys in part for key in keys}
        add_teacher_logprobs(policy, used, samples, config, early or EarlyLogprobs())
    if teacher_passes(config):
        passes = [*passes, TEACHER_LOGPROBS]
    if passes:
        _refuse_bad_passes(samples, passes)
    measured = StepMeasures.begin(plan.tags.values(), config)
    if recomputes and plan.mini_batches:
        measured.compare_in_pass(samples, rows)
    _set_advantages(plan, samples, rows, config, metrics)
    distil(plan.tags, samples, config, metrics)
    kept = reject_before_updates(samples, config, metrics) if plan.mini_batches else None
    updates, made = list(_updates(plan, packed, config, kept)), 0

    def check(values: Mapping[str, float]) -> None:
        measured.compare_in_update(values, None if recomputes else policy.source_gaps)
        record_measures(metrics, measured)
        watch(plan, measured)

    with timer.phase("update"):
        for number, (mine, counts, ready) in enumerate(updates):
            if interpolates_proximal(config):
                set_interpolation(mine, rows, version=plan.version, updates=made)
            update = partial(
                policy.update, mine, counts, packed=ready, another_follows=number + 1 < len(updates),
                measure_entropy=made == 0 and entropy_due(config, step), check=_unchecked if made else check,
            )  # fmt: skip
            if (values := _make_update(update, mine, made, step)) is None:
                continue
            if made and not recomputes:
                measured.add_gaps(policy.source_gaps)
            made += 1
            record_update(metrics, values, config)
    if not made:
        watch(plan, measured)
    metrics.record("policy/updates", made)


def _make_update(
    update: Callable[[], dict[str, float]], mine: Sequence[TrainSample], made: int, step: int
) -> dict[str, float] | None:
    """Call `update` for the samples `mine` and record its time. Return its metrics; None if no token has a weight.

    `made`: the updates of the step before this one, which a refusal names.
    """
    begin = time.monotonic()
    try:
        values = update()
    except NoTokensError:
        return None
    except StepRefused as error:
        error.updates = made
        raise
    tokens = sum(len(each.prompt_ids) + len(each.response_ids) for each in mine)
    args = {"samples": len(mine), "tokens": tokens}
    events.record("mini_batch", begin, time.monotonic(), key=step + 1, step=step + 1, args=args)
    return values


def _unchecked(values: Mapping[str, float]) -> None:
    """Accept an update after the first one of a step."""


def _refuse_bad_logprobs(plan: StepPlan) -> None:
    """Raise NonFiniteError, on every rank, if a sample of the batch has failed by its engine's log-probs."""
    bad = [key for key, tag in plan.tags.items() if tag.bad_logprobs]
    if bad:
        raise NonFiniteError(
            f"the log-probs that the engines returned are not finite in {len(bad)} of {len(plan.tags)} samples (the "
            f"first: sample {bad[0]}); no weight was changed"
        )


def _refuse_bad_passes(samples: Mapping[str, TrainSample], streams: Sequence[str]) -> None:
    """Raise NonFiniteError, on every rank, if a pass of the trainer has given a log-prob that is not finite.

    The loss would tell it too, but perhaps only after a first update of the step.
    """
    own = [
        key
        for key, each in samples.items()
        if not all(each.streams[name].isfinite().all() for name in streams if name in each.streams)
    ]
    bad = [key for part in parallel.dp_all_gather_object(own, _KEYS) for key in part]
    if bad:
        raise NonFiniteError(
            f"the log-probs ({', '.join(streams)}) that the trainer computed are not finite in {len(bad)} samples (the "
            f"first: sample {bad[0]}); no weight was changed"
        )


def _updates(
    plan: StepPlan, packed: PackedStep, config: Config, kept: Mapping[str, int] | None
) -> Iterator[tuple[list[TrainSample], GlobalCounts, PackedBatch | None]]:
    """Yield for each update this rank's samples, the counts of all ranks, and the samples packed, if they are.

    `kept`: the tokens that each sample trains, if masks have taken some out since the samples were packed. A mini-batch
    whose samples are all masked, as truncated or by a correction, makes no update.
    """
    ready_made = packed.updates if kept is None else []
    ahead: list[PackedBatch | None] = [*ready_made] or [None] * len(plan.mini_batches)
    for mini_batch, ready in zip(plan.mini_batches, ahead, strict=True):
        if (counts := _counts(plan, mini_batch, config, kept)).tokens:
            yield [packed.samples[key] for key in mini_batch[parallel.dp_rank()]], counts, ready


def _compute_logprobs(policy: Policy, packed: PackedStep, stream: str, early: EarlyLogprobs) -> None:
    """Give every sample the log-probs `stream`: those of `early`, and by a pass those that it lacks. Collective."""
    samples = packed.samples
    found = early.of(stream)
    for key, values_R in found.items():
        samples[key].streams[stream] = values_R
    missing = [sample for key, sample in samples.items() if key not in found]
    if stream not in early.complete:
        results = policy.compute_logprobs(missing, reference=stream == REFERENCE_LOGPROBS, packed=packed.whole)
        for sample, result in zip(missing, results, strict=True):
            sample.streams[stream] = result.logprobs_R
    elif missing:
        raise ValueError(f"no {stream} were computed early of {len(missing)} samples that were said to have them")


def entropy_due(config: Config, step: int) -> bool:
    """Tell whether the step after `step` others of the history measures the entropy of its first mini-batch."""
    every = config.telemetry.entropy_every
    return every > 0 and step % every == 0


def train_samples(
    plan: StepPlan, rows: Mapping[str, Trajectory], config: Config, replica: int
) -> dict[str, TrainSample]:
    """Return a replica's samples by key, with the engine's log-probs: the old ones, unless the trainer's own are."""
    trained = {sample.key: sample.trained for group in plan.shaped.groups for sample in group}
    sources, compares_all = TokenSources.of(plan.tags.values(), config), recomputes_old_logprobs(config)
    # A mini-batch is compared with the weights after the updates before it, unless all are with those before the first.
    made = [int(_counts(plan, parts, config, None).tokens > 0) for parts in plan.mini_batches]
    before = itertools.accumulate(made, initial=0)
    update_of = {
        key: number for number, parts in zip(before, plan.mini_batches, strict=False) for key in parts[replica]
    }
    engine = ROLLOUT_LOGPROBS if correction_of(config) else OLD_LOGPROBS
    temperatures = own_temperatures(config)
    samples = {}
    keys = plan.keys_of(replica)
    versions = [plan.version + (0 if compares_all else update_of[key]) for key in keys]
    for key, sources_R in zip(keys, sources.of_rows([rows[key] for key in keys], versions), strict=True):
        row = rows[key]
        row = replace(row, streams={**row.streams, **default_weights(config, row)})
        samples[key] = TrainSample.of(row, trained=trained[key], temperature=temperatures.get(row.dataset))
        samples[key].streams[engine] = torch.tensor(row.rollout_logprobs, dtype=torch.float32)
        samples[key].streams[SOURCES] = sources_R
    return samples


def _set_advantages(
    plan: StepPlan,
    samples: Mapping[str, TrainSample],
    rows: Mapping[str, Trajectory],
    config: Config,
    metrics: StepMetrics,
) -> None:
    """Set each sample's advantages from shaped rewards; with `kl.where: reward`, subtract the sample's KL first."""
    groups = [by_sample(group) for group in plan.shaped.groups]
    kl = config.algorithm.kl
    if config.needs_reference and kl.where == "reward" and groups:
        penalty = _kl_of_all(samples, rows, config)
        lowered = [
            [
                replace(row, reward=row.reward - kl.coef * sum(penalty[each.key] for each in rows))
                for rows in group
                for row in rows
            ]
            for group in groups
        ]
        groups = [by_sample(group) for group in with_advantages(lowered, advantage_of(config))]
    rewards = [[rows[0].reward for rows in group] for group in groups]
    advantages = [[rows[0].advantage for rows in group] for group in groups]
    for row in (row for group in groups for rows_of_sample in group for row in rows_of_sample):
        if row.key not in samples:
            continue
        if row.turn_advantages:
            samples[row.key].set_turn_advantages(row.turn_advantages, plan.tags[row.key].turn_starts)
        else:
            samples[row.key].set_advantage(row.advantage)
    first = [plan.tags[group[0].key] for group in plan.shaped.groups]
    new = [tag.group_id not in plan.reused and not tag.demonstrated for tag in first]
    if flat := [value for group in itertools.compress(rewards, new) for value in group]:
        metrics.record("reward/shaped_mean", sum(flat) / len(flat))
    judged = itertools.compress(advantages, [not tag.demonstrated for tag in first])
    if own := [value for group in judged for value in group]:
        spread = torch.tensor(own, dtype=torch.float64)
        metrics.record("policy/advantage_mean", float(spread.mean()))
        metrics.record("policy/advantage_std", float(spread.std(correction=0)))


def _kl_of_all(samples: Mapping[str, TrainSample], rows: Mapping[str, Trajectory], config: Config) -> dict[str, float]:
    """Return the KL to the reference of every response of the step, summed over its sampled tokens, on every rank."""
    own = {}
    for key, sample in samples.items():
        old_R = sample.streams.get(OLD_LOGPROBS, sample.streams.get(ROLLOUT_LOGPROBS))
        assert old_R is not None  # train_samples sets one of them
        kl_R = kl_penalty(old_R, sample.streams[REFERENCE_LOGPROBS], config.algorithm.kl.estimator)
        sampled_R = torch.tensor(rows[key].response_mask, dtype=torch.bool)
        own[key] = float(kl_R[sampled_R].double().sum())
    return {key: value for part in parallel.dp_all_gather_object(own, _SUMS) for key, value in part.items()}


def _counts(
    plan: StepPlan, mini_batch: Sequence[Sequence[str]], config: Config, kept: Mapping[str, int] | None
) -> GlobalCounts:
    trained = {sample.key for group in plan.shaped.groups for sample in group if sample.trained}
    keys = [key for part in mini_batch for key in part if key in trained]
    lengths = [plan.tags[key].sampled_tokens if kept is None else kept[key] for key in keys]
    return GlobalCounts.of(lengths, config.sampling.max_tokens)
