"""Metrics of the batch of a step: rewards, prompt groups, samples and tokens, training sets."""

from megarl.telemetry.metrics.registry import Metric

REWARD = [
    Metric("reward/mean", "reward", "mean", "Mean reward, before KL and length shaping."),
    Metric("reward/std", "reward", "mean", "Standard deviation over the samples of the step."),
    Metric(
        "reward/stderr",
        "reward",
        "mean",
        "Standard error of `reward/mean`, with the samples of a prompt group as one cluster; none for a single group.",
    ),
    Metric("reward/min", "reward", "min", "Smallest reward."),
    Metric("reward/max", "reward", "max", "Largest reward."),
    Metric(
        "reward/shaped_mean",
        "reward",
        "mean",
        "Mean after overlong penalty, truncation rule and KL in reward.",
    ),
    Metric(
        "reward/accuracy",
        "share",
        "mean",
        "Share of correct samples, where all rewards are 0 or 1.",
    ),
    Metric(
        "reward/errors",
        "samples",
        "sum",
        "Samples whose reward function hung, raised, crashed or returned no finite number; failed samples with "
        "`reward.on_error: drop`.",
    ),
    Metric(
        "reward/redone",
        "samples",
        "sum",
        "Samples scored again because their reward process ended, ran out of memory or gave a wrong answer.",
    ),
    Metric("reward/component/{component}", "reward", "mean", "Mean of one named component of the reward."),
]

PROMPT_GROUPS = [
    Metric("groups/admitted", "groups", "sum", "Groups of this batch; equals the sum of the next four."),
    Metric(
        "groups/trained",
        "groups",
        "sum",
        "Groups that took part in the update, counted by the samples that its backward passes went through, including "
        "those of a mini-batch without an update because no token has a weight.",
    ),
    Metric(
        "groups/filtered",
        "groups",
        "sum",
        "Groups dropped because all their rewards are equal, including those that rollout replaced.",
    ),
    Metric("groups/dropped_stale", "groups", "sum", "Groups dropped because their oldest token was too old."),
    Metric("groups/failed", "groups", "sum", "Groups with fewer than two usable samples."),
    Metric(
        "groups/reused",
        "groups",
        "sum",
        "Groups of earlier steps that are trained again (`admission.max_uses`). They are not admitted again, and "
        "count in metrics of training (`batch/*`, `policy/*`, `correction/*`, `mismatch/*`, `total/trained_*`) but "
        "not in `reward/*` and `rollout/*`.",
    ),
    Metric("groups/solve_all", "share", "mean", "Share of the batch's groups in which every sample is correct."),
    Metric("groups/solve_none", "share", "mean", "Share of the batch's groups in which no sample is correct."),
]

BATCH = [
    Metric("batch/samples", "samples", "sum", "Samples in the batch."),
    Metric("batch/trained_samples", "samples", "sum", "Samples that took part in the update."),
    Metric(
        "batch/failed_samples",
        "samples",
        "sum",
        "Failed samples: engine error, NaN or -9999 log-prob, abort, no reward.",
    ),
    Metric("batch/demonstrations", "samples", "sum", "Samples whose response came from the data."),
    Metric("batch/masked_samples", "samples", "sum", "Truncated samples masked from the loss."),
    Metric("batch/prompt_tokens", "tokens", "sum", "Prompt tokens of the batch."),
    Metric("batch/response_tokens", "tokens", "sum", "Response tokens of the batch."),
    Metric("batch/reused_tokens", "tokens", "sum", "Response tokens in groups that an earlier step has trained."),
    Metric("batch/trained_tokens", "tokens", "sum", "Prompt and response tokens that passed through the update."),
    Metric("batch/loss_tokens", "tokens", "sum", "Response tokens with a loss."),
    Metric("batch/length_mean", "tokens", "mean", "Mean response length of the trained groups' samples."),
    Metric("batch/length_max", "tokens", "max", "The same, longest."),
    Metric("batch/stale_length_mean", "tokens", "mean", "Mean response length of the groups dropped as stale."),
    Metric("batch/stale_length_max", "tokens", "max", "The same, longest."),
    Metric(
        "batch/staleness_mean",
        "updates",
        "mean",
        "Updates between the weights of a trained sample's oldest token and the update that trains it.",
    ),
    Metric("batch/staleness_p95", "updates", "last", "The same, 95th percentile over samples."),
    Metric("batch/staleness_max", "updates", "max", "The same, maximum over samples."),
    Metric("batch/dp_imbalance", "ratio", "max", "Largest number of tokens of a DP rank over their mean; 1 is even."),
]

DATA = [
    Metric("data/{set}/groups", "groups", "sum", "Groups of the set in this batch."),
    Metric("data/{set}/reward_mean", "reward", "mean", "Their mean reward, before KL and length shaping."),
    Metric(
        "data/{set}/teacher_kl",
        "nats",
        "mean",
        "Reverse KL to the set's teacher per sampled token (k1): log-prob of the policy that sampled - teacher's.",
    ),
    Metric("data/{set}/truncated_share", "share", "mean", "Share of their responses cut at the set's `max_tokens`."),
]
