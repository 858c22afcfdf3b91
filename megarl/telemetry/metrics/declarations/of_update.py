"""Metrics of the update: the loss and its terms, corrections, and how far engine and trainer differ."""

from megarl.telemetry.metrics.registry import Metric

POLICY = [
    Metric("policy/loss", "loss", "mean", "The objective that was differentiated, mean over mini-batches."),
    Metric("policy/policy_loss", "loss", "mean", "Its policy-gradient part, without KL, entropy and cross-entropy."),
    Metric("policy/entropy", "nats", "weighted", "Entropy of the policy per token."),
    Metric("policy/ratio", "ratio", "weighted", "Importance ratio new/old per token; 1 on policy."),
    Metric("policy/ratio_max", "ratio", "max", "Largest importance ratio."),
    Metric("policy/ess", "share", "weighted", "Relative effective sample size of the ratios; 1 on policy."),
    Metric("policy/approx_kl", "nats", "weighted", "k3 estimate of KL(old || new) per token."),
    Metric(
        "policy/kl_ref",
        "nats",
        "weighted",
        "KL to the reference policy per token, by `algorithm.kl.estimator`; with `algorithm.distill.where: loss` that "
        "to the teacher, by `algorithm.distill.estimator`.",
    ),
    Metric(
        "policy/teacher_kl",
        "nats",
        "mean",
        "Reverse KL to the teachers per sampled token of the samples that have one, as `data/{set}/teacher_kl`.",
    ),
    Metric("policy/ref_kl_loss", "loss", "mean", "The term `ref_kl` of the objective, before its coefficient."),
    Metric("policy/ref_kl_tokens", "tokens", "sum", "Tokens in the term `ref_kl`, over all updates of the step."),
    Metric("policy/ce", "nats", "weighted", "Cross-entropy of the tokens in the term `ce`, per token."),
    Metric("policy/ce_loss", "loss", "mean", "The term `ce` of the objective, before its coefficient."),
    Metric("policy/ce_tokens", "tokens", "sum", "Tokens in the term `ce`, over all updates of the step."),
    Metric("policy/clip_fraction", "share", "weighted", "Share of tokens whose ratio was clipped."),
    Metric("policy/clip_low", "share", "weighted", "Share of tokens that the loss bounds below (ppo: 1 - clip_low)."),
    Metric("policy/clip_high", "share", "weighted", "Share of tokens that the loss bounds above (ppo: 1 + clip_high)."),
    Metric("policy/clip_dual", "share", "weighted", "Share of tokens limited by a second bound (PPO: the dual clip)."),
    Metric("policy/logprob_abs_diff", "nats", "weighted", "|new - old log-prob| per token, during the update."),
    Metric("policy/logprob_abs_diff_max", "nats", "max", "The same, maximum over tokens."),
    Metric("policy/grad_norm", "norm", "mean", "Global gradient norm before clipping, mean over mini-batches."),
    Metric("policy/grad_norm_max", "norm", "max", "The same, maximum over mini-batches."),
    Metric("policy/lr", "1", "last", "Learning rate of the last update."),
    Metric("policy/updates", "updates", "sum", "Optimizer updates."),
    Metric("policy/tokens", "tokens", "sum", "Tokens with a loss, over all updates of the step."),
    Metric("policy/sequences", "samples", "sum", "Sequences with a loss, over all updates of the step."),
    Metric("policy/aux_loss", "loss", "mean", "MoE load-balancing loss without its coefficient; 1 is even."),
    Metric("policy/moe_z_loss", "loss", "mean", "MoE router z-loss of a token, without its coefficient."),
    Metric("policy/advantage_mean", "1", "mean", "Mean advantage of the trained samples."),
    Metric("policy/advantage_std", "1", "mean", "Standard deviation of the trained samples' advantages."),
]

CORRECTION = [
    Metric("correction/weight_mean", "1", "weighted", "Mean weight; 1 where trainer and engine agree."),
    Metric("correction/weight_max", "1", "max", "Largest weight."),
    Metric("correction/capped_share", "share", "weighted", "Share of tokens whose weight was capped."),
    Metric(
        "correction/masked_share",
        "share",
        "weighted",
        "Share of tokens that the band of the weight or a mask excludes.",
    ),
    Metric(
        "correction/ess",
        "share",
        "weighted",
        "Relative effective sample size of the weights, masked tokens with 0; 1 if all are equal.",
    ),
    Metric("correction/sequence_ess", "share", "weighted", "The same over sequences, each by its tokens' mean weight."),
    Metric("correction/capped_sequences_share", "share", "weighted", "Share of sequences with a capped token."),
    Metric("correction/masked_sequences_share", "share", "weighted", "Share of sequences with a masked token."),
    Metric("correction/dropped_sequences_share", "share", "weighted", "Share of completely masked sequences."),
    Metric(
        "correction/{mask}/rejected_share",
        "share",
        "weighted",
        "Share of tokens that this mask of `algorithm.correction.masks` excludes.",
    ),
    Metric(
        "correction/{mask}/largest",
        "nats",
        "max",
        "Largest absolute value that this mask bounds, over tokens or sequences: a KL estimate or a log-ratio.",
    ),
]

MISMATCH = [
    Metric(
        "mismatch/logprob_abs_diff_mean",
        "nats",
        "weighted",
        "Mean |engine - trainer| over all response tokens.",
    ),
    Metric("mismatch/logprob_abs_diff_max", "nats", "max", "The same, maximum over tokens."),
    Metric("mismatch/logprob_pearson", "1", "weighted", "Pearson correlation of engine and trainer log-probs."),
    Metric("mismatch/k3_kl", "nats", "weighted", "k3 estimate of KL(engine || trainer) per token."),
    Metric("mismatch/ess", "share", "weighted", "Relative effective sample size of trainer/engine ratios."),
    Metric("mismatch/tokens", "tokens", "sum", "Response tokens compared."),
    Metric(
        "mismatch/ratio_tail_share",
        "share",
        "weighted",
        "Share of tokens whose probability differs by a factor of more than 2.",
    ),
    Metric(
        "mismatch/lag/{lag}/tokens",
        "tokens",
        "sum",
        "Tokens whose weights were this many updates older than the trainer's; the last of 16 lags has all older ones.",
    ),
    Metric("mismatch/lag/{lag}/logprob_abs_diff", "nats", "weighted", "Mean |engine - trainer| over them."),
    Metric("mismatch/lag/{lag}/k3_kl", "nats", "weighted", "k3 estimate of KL(engine || trainer) over them."),
    Metric("mismatch/lag/{lag}/ess", "share", "weighted", "Relative effective sample size over them."),
    Metric(
        "mismatch/replica/{replica}/tokens",
        "tokens",
        "sum",
        "Tokens that the engine of this replica sampled; for at most 32 replicas.",
    ),
    Metric(
        "mismatch/replica/{replica}/logprob_abs_diff",
        "nats",
        "weighted",
        "Mean |engine - trainer| over them, at all lags.",
    ),
]
