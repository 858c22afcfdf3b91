"""The declared metrics of a batch, computed from tags alone, so that every rank has them."""

import math
import resource
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set

import psutil
import torch

from megarl import platforms
from megarl.common.values import GIB, KIB, first_parts
from megarl.config.derived.logprob_passes import recomputes_old_logprobs
from megarl.config.memory_plan.parameters import model_parameters
from megarl.config.schema import Config
from megarl.evaluation.accuracy import are_verdicts
from megarl.models.architecture.architecture import ModelInfo
from megarl.queue.trajectory import SampleTag
from megarl.run.step.plan import StepPlan
from megarl.telemetry.metrics.registry import StepMetrics

# Speed and memory of a step as declared metrics, from its token counts and phase times.

# Peak bf16 TFLOP/s for dense matrices, from the vendor's data sheets. No MFU is reported for other devices.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "H20": 148.0, "B200": 2250.0}


def peak_memory_gib(group: torch.distributed.ProcessGroup | None) -> float:
    """Return the highest memory of any rank so far in GiB: device memory, or resident memory on CPU. Collective."""
    peak_B = torch.tensor([_own_peak()], dtype=torch.int64)
    torch.distributed.all_reduce(peak_B, torch.distributed.ReduceOp.MAX, group=group)
    return int(peak_B.item()) / GIB


def _own_peak() -> int:
    """Return the highest memory of this rank so far, in bytes."""
    if platforms.current().is_cuda:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB  # Linux counts it in KiB


class Performance:
    """Computes speed metrics from the values of a step; built once per run."""

    def __init__(self, config: Config, info: ModelInfo) -> None:
        self._config = config
        _, self._active = model_parameters(info)
        self._attention = info.attention_layers * info.heads * (info.head_dim + info.value_dim) / 2
        self._trainer_gpus = config.trainer.gpus
        self._engine_gpus = config.rollout.tensor_parallel
        self._peak = self._peak_tflops()

    def flops_per_token(self, context: float) -> float:
        """Return the forward FLOPs of one token that attends to `context` tokens on average.

        They are 2 per active weight, and 4 per attended token and attention dimension.
        """
        return 2.0 * self._active + 4.0 * self._attention * context

    def of_step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the `perf/*` metrics that follow from the values of a step.

        A forward pass counts once, a backward pass twice. Recomputation is not counted (MFU, not HFU).
        """
        tokens = values["batch/trained_tokens"]
        seconds = values["time/logprobs"] + values["time/update"]
        step, engine = values["time/step"], values.get("rollout/engine_seconds", 0.0)
        # Lost ones keep their GPUs until they are replaced.
        replicas = sum(values.get(f"rollout/replicas_{state}", 0.0) for state in ("alive", "lost", "idle"))
        rollout_gpus = max(1.0, replicas) * self._engine_gpus
        result = {"perf/host_memory_gib": psutil.Process().memory_info().rss / GIB}
        if tokens and seconds:
            rate = tokens / seconds
            result["perf/trainer_tokens_per_second"] = rate
            result["perf/trainer_tokens_per_second_per_gpu"] = rate / self._trainer_gpus
            length = values.get("rollout/prompt_length_mean", 0) + values.get("rollout/response_length_mean", 0)
            passes = 3.0 + self._extra_passes()
            tflops = rate * passes * self.flops_per_token(length / 2) / self._trainer_gpus / 1e12
            result["perf/trainer_tflops_per_gpu"] = tflops
            if self._peak is not None:
                result["perf/trainer_mfu"] = tflops / self._peak
        if engine:
            generated = values["batch/response_tokens"] - values.get("batch/reused_tokens", 0.0)
            rate = (generated + values.get("rollout/replaced_tokens", 0.0)) / engine
            result["perf/rollout_tokens_per_second"] = rate
            result["perf/rollout_tokens_per_second_per_gpu"] = rate / rollout_gpus
        if step:
            result["perf/tokens_per_second"] = tokens / step
            result["perf/tokens_per_second_per_gpu"] = tokens / step / (self._trainer_gpus + rollout_gpus)
        return result

    def _extra_passes(self) -> float:
        """Return the number of forward passes in addition to the update's own."""
        return float(recomputes_old_logprobs(self._config)) + float(self._config.needs_reference)

    def _peak_tflops(self) -> float | None:
        """Return the device's peak; None if it is unknown or the precision is not bf16."""
        if not platforms.current().is_cuda or self._config.trainer.precision != "bf16":
            return None
        name = torch.cuda.get_device_name()
        return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


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
