"""The declared metrics of a batch, computed from tags alone, so that every rank has them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence, Set

from megarl.common.values import first_parts
from megarl.evaluation.accuracy import are_verdicts
from megarl.queue.trajectory import SampleTag
from megarl.run.step.plan import StepPlan
from megarl.telemetry.metrics.registry import StepMetrics

LENGTHS = (10, 50, 90, 99)  # percentiles of the response length


def record_batch(metrics: StepMetrics, plan: StepPlan, trained: Set[int]) -> None:
    """Record `reward/*`, `groups/*`, `batch/*`, the lengths and lags under `rollout/*`, `data/*` of several sets.

    Samples that an earlier step has trained are only in `batch/*`, because they were generated and scored once; so are
    demonstrations, which never were. Numbers of samples and means of rewards are over samples; lengths, tokens and lags
    are over all their trajectories. `trained`: the groups that the step has trained, as `train_step` returns them.
    """
    tags, new = list(plan.tags.values()), plan.new_tags
    usable = [tag for tag in tags if tag.status == "ok"]
    newly_usable = [tag for tag in new if tag.status == "ok"]
    generated = [tag for tag in newly_usable if not tag.demonstrated]
    _rewards(metrics, first_parts(generated))
    _groups(metrics, plan, trained, first_parts(generated))
    _lengths(metrics, plan, generated)
    _datasets(metrics, first_parts(new))
    planned = [row for group in plan.shaped.groups for row in group]
    in_loss = [row for row in planned if row.trained]
    metrics.update(
        {
            "samples": len(first_parts(tags)),
            "trained_samples": len(first_parts(in_loss)),
            "failed_samples": len(first_parts(tags)) - len(first_parts(usable)),
            "demonstrations": sum(tag.demonstrated for tag in first_parts(usable)),
            "masked_samples": plan.shaped.masked_samples,
            "prompt_tokens": sum(tag.prompt_tokens for tag in tags),
            "response_tokens": sum(tag.response_tokens for tag in tags),
            "reused_tokens": sum(tag.response_tokens for tag in tags) - sum(tag.response_tokens for tag in new),
            "trained_tokens": sum(tag.total_tokens for tag in planned),
            "loss_tokens": sum(tag.sampled_tokens for tag in in_loss),
        },
        prefix="batch/",
    )
    _staleness(metrics, plan)
    for mini_batch in plan.mini_batches:
        loads = [sum(plan.tags[key].total_tokens for key in part) for part in mini_batch]
        metrics.record("batch/dp_imbalance", max(loads) * len(loads) / sum(loads))


def nothing_trained(plan: StepPlan) -> str:
    """Return why a step trains nothing, so that its losses are empty; "" if it trains a group."""
    outcome = plan.outcome
    if outcome.trained or outcome.reused:
        return ""
    ends = {
        "filtered because all their rewards are equal (algorithm.filter_zero_variance)": outcome.filtered,
        "failed": outcome.failed,
        "too old (admission.max_staleness)": outcome.dropped_stale,
    }
    listed = ", ".join(f"{count} {end}" for end, count in ends.items() if count)
    return f"nothing was trained: of {sum(ends.values())} groups {listed or 'none was there'}"


def _staleness(metrics: StepMetrics, plan: StepPlan) -> None:
    """Record the staleness of trained samples, and the lengths of trained and of stale ones."""
    stale = [plan.tags[key].response_tokens for key in plan.stale if not plan.tags[key].failed]
    trained = [row.response_tokens for group in plan.shaped.groups for row in group]
    for name, lengths in (("length", trained), ("stale_length", stale)):
        if lengths:
            metrics.update({f"{name}_mean": statistics.fmean(lengths), f"{name}_max": max(lengths)}, prefix="batch/")
    # Mini-batch m is trained by the m-th update after the step's version.
    lags = sorted(
        plan.version + number - plan.tags[key].oldest_version
        for number, mini_batch in enumerate(plan.mini_batches)
        for part in mini_batch
        for key in part
        if not plan.tags[key].demonstrated
    )
    if lags:
        p95 = lags[min(len(lags) - 1, int(0.95 * len(lags)))]
        metrics.update({"mean": statistics.fmean(lags), "p95": p95, "max": lags[-1]}, prefix="batch/staleness_")


def _rewards(metrics: StepMetrics, usable: list[SampleTag]) -> None:
    rewards = [tag.reward for tag in usable]
    if not rewards:
        return
    metrics.update(
        {
            "mean": statistics.fmean(rewards),
            "std": statistics.pstdev(rewards),
            "min": min(rewards),
            "max": max(rewards),
        },
        prefix="reward/",
    )
    if are_verdicts(rewards):
        metrics.record("reward/accuracy", statistics.fmean(rewards))
    groups: dict[int, list[float]] = defaultdict(list)
    for tag in usable:
        groups[tag.group_id].append(tag.reward)
    if len(groups) > 1:
        metrics.record("reward/stderr", clustered_stderr(list(groups.values())))
    components: dict[str, list[float]] = defaultdict(list)
    for tag in usable:
        for name, value in tag.reward_components.items():
            components[name].append(value)
    for name, values in components.items():
        metrics.record(f"reward/component/{name}", statistics.fmean(values))


def clustered_stderr(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean when values of one group depend on each other.

    It is the cluster-robust estimate (Liang and Zeger, 1986) with the factor G / (G - 1) for G >= 2 groups. The samples
    of a prompt group share its difficulty, so the error without groups would be too small.
    """
    count = sum(map(len, groups))
    mean = math.fsum(value for group in groups for value in group) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    return math.sqrt(squares * len(groups) / (len(groups) - 1)) / count


def _groups(metrics: StepMetrics, plan: StepPlan, trained: Set[int], usable: list[SampleTag]) -> None:
    groups: dict[int, list[float]] = defaultdict(list)
    for tag in usable:
        groups[tag.group_id].append(tag.reward)
    outcome = plan.outcome
    metrics.update(
        {
            "admitted": len(plan.admitted),
            "trained": len(trained - plan.reused),
            "filtered": outcome.filtered,
            "dropped_stale": outcome.dropped_stale,
            "failed": outcome.failed,
            "reused": len(trained & plan.reused),
        },
        prefix="groups/",
    )
    if groups and are_verdicts([tag.reward for tag in usable]):
        metrics.record("groups/solve_all", statistics.fmean(all(group) for group in groups.values()))
        metrics.record("groups/solve_none", statistics.fmean(not any(group) for group in groups.values()))


def _lengths(metrics: StepMetrics, plan: StepPlan, usable: list[SampleTag]) -> None:
    if not usable:
        return
    prompts = [tag.prompt_tokens for tag in usable]
    responses = sorted(tag.response_tokens for tag in usable)
    lags = [plan.version - tag.oldest_version for tag in usable]
    metrics.update(
        {
            "prompt_length_mean": statistics.fmean(prompts),
            "prompt_length_max": max(prompts),
            "response_length_mean": statistics.fmean(responses),
            "response_length_max": responses[-1],
            "response_length_min": responses[0],
            **{f"response_length_p{p}": responses[min(len(responses) - 1, p * len(responses) // 100)] for p in LENGTHS},
            "truncated_share": statistics.fmean(tag.finish_reason == "length" for tag in usable),
            "aborted_share": statistics.fmean(tag.finish_reason == "abort" for tag in usable),
            "version_lag_mean": statistics.fmean(lags),
            "version_lag_max": max(lags),
        },
        prefix="rollout/",
    )
    by_lag: Counter[int] = Counter()
    for tag in usable:
        for version, tokens in tag.version_tokens.items():
            by_lag[plan.version - int(version)] += tokens
    metrics.update({str(lag): by_lag[lag] for lag in sorted(by_lag)}, prefix="rollout/version_lag_tokens/")


def _datasets(metrics: StepMetrics, tags: list[SampleTag]) -> None:
    by_set: dict[str, list[SampleTag]] = defaultdict(list)
    for tag in tags:
        if tag.dataset:
            by_set[tag.dataset].append(tag)
    for name, own in sorted(by_set.items()):
        metrics.record(f"data/{name}/groups", len({tag.group_id for tag in own}))
        if usable := [tag for tag in own if not tag.failed and not tag.demonstrated]:
            metrics.record(f"data/{name}/reward_mean", statistics.fmean(tag.reward for tag in usable))
            metrics.record(f"data/{name}/truncated_share", statistics.fmean(tag.truncated for tag in usable))
