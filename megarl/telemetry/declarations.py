"""Declares every metric of megarl once; `docs/metrics.md` is generated from these tables."""

from __future__ import annotations

from megarl.telemetry.metrics import Metric, Registry, StepMetrics

GROUPS: dict[str, str] = {
    "reward": "Rewards of the step's samples, without failed samples.",
    "groups": "Prompt groups by outcome, and their difficulty.",
    "batch": "Contents of the update.",
    "data": "Each training set of `data.sets`; none with `data.path`.",
    "rollout": "Generation.",
    "agent": "Agents: their turns and their calls of tools; none with `agent.loop: single_turn`.",
    "policy": "The update, over every trained response token of the step.",
    "correction": "Importance weights and masks of the token losses, over every trained token, masked ones included, "
    "if there is a correction (`algorithm.correction`, docs/corrections.md).",
    "mismatch": "Engine against trainer, before the first update of the step: log-probs of the same tokens, under the "
    "same weights with `admission.mode: sync`, otherwise under weights that may be `rollout/version_lag_max` updates "
    "apart.",
    "monitor": "Alarms and what they did ([monitor](monitor.md)).",
    "sync": "Weight sync from trainer to engines.",
    "time": "Seconds of the step by phase; phases do not overlap and add up to `time/step`.",
    "perf": "Speed and memory.",
    "eval": "Held-out evaluation, per set.",
    "total": "Totals since the start of the run.",
}

_REWARD = [
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
        "Share of samples whose reward is at least 1 (the answer is correct).",
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
        "Samples that were scored again because their reward process ended, answered something else or ran out of "
        "memory.",
    ),
    Metric("reward/component/{component}", "reward", "mean", "Mean of one named component of the reward."),
]

_GROUPS = [
    Metric("groups/admitted", "groups", "sum", "Groups of this batch; equals the sum of the next four."),
    Metric("groups/trained", "groups", "sum", "Groups that took part in the update."),
    Metric(
        "groups/filtered",
        "groups",
        "sum",
        "Groups dropped because all their rewards are equal, those that rollout replaced included.",
    ),
    Metric("groups/dropped_stale", "groups", "sum", "Groups dropped because their oldest token was too old."),
    Metric("groups/failed", "groups", "sum", "Groups with fewer than two usable samples."),
    Metric(
        "groups/reused",
        "groups",
        "sum",
        "Groups of earlier steps that are trained again (`admission.max_uses`): not admitted again, and part of what "
        "describes training (`batch/*`, `policy/*`, `correction/*`, `mismatch/*`, `total/trained_*`), not of "
        "`reward/*` and `rollout/*`.",
    ),
    Metric("groups/solve_all", "share", "mean", "Share of the batch's groups in which every sample is correct."),
    Metric("groups/solve_none", "share", "mean", "Share of the batch's groups in which no sample is correct."),
]

_BATCH = [
    Metric("batch/samples", "samples", "sum", "Samples in the batch."),
    Metric("batch/trained_samples", "samples", "sum", "Samples that took part in the update."),
    Metric(
        "batch/failed_samples",
        "samples",
        "sum",
        "Failed samples: engine error, NaN or -9999 log-prob, abort, no reward.",
    ),
    Metric("batch/demonstrations", "samples", "sum", "Samples whose response was given with the data."),
    Metric("batch/masked_samples", "samples", "sum", "Truncated samples masked from the loss."),
    Metric("batch/prompt_tokens", "tokens", "sum", "Prompt tokens of the batch."),
    Metric("batch/response_tokens", "tokens", "sum", "Response tokens of the batch."),
    Metric("batch/reused_tokens", "tokens", "sum", "Those of them in groups that an earlier step has trained."),
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

_DATA = [
    Metric("data/{set}/groups", "groups", "sum", "Groups of this batch that are of the set."),
    Metric("data/{set}/reward_mean", "reward", "mean", "Their mean reward, before KL and length shaping."),
    Metric(
        "data/{set}/teacher_kl",
        "nats",
        "mean",
        "Reverse KL to the set's teacher per sampled token (k1): log-prob of the policy that sampled - teacher's.",
    ),
    Metric("data/{set}/truncated_share", "share", "mean", "Share of their responses cut at the set's `max_tokens`."),
]

_ROLLOUT = [
    Metric("rollout/prompt_length_mean", "tokens", "mean", "Mean prompt length."),
    Metric("rollout/prompt_length_max", "tokens", "max", "Longest prompt."),
    Metric("rollout/response_length_mean", "tokens", "mean", "Mean response length, EOS included."),
    Metric("rollout/response_length_max", "tokens", "max", "Longest response."),
    Metric("rollout/response_length_min", "tokens", "min", "Shortest response."),
    Metric(
        "rollout/response_length_p{percent}", "tokens", "last", "Percentiles of the response length: 10, 50, 90, 99."
    ),
    Metric("rollout/truncated_share", "share", "mean", "Share of responses cut at `sampling.max_tokens`."),
    Metric("rollout/aborted_share", "share", "mean", "Share of responses that ended by an abort."),
    Metric("rollout/skipped_prompts", "prompts", "sum", "Prompts skipped because they are too long."),
    Metric(
        "rollout/version_lag_mean",
        "versions",
        "mean",
        "Updates made to the trainer's weights before the step minus those of the oldest token.",
    ),
    Metric("rollout/version_lag_max", "versions", "max", "The same, maximum over samples."),
    Metric(
        "rollout/version_lag_tokens/{lag}",
        "tokens",
        "sum",
        "Sampled tokens of the batch whose weights were `lag` updates older than the trainer's before the step.",
    ),
    Metric(
        "rollout/groups_replaced",
        "groups",
        "sum",
        "Groups without signal that were replaced before the queue (`admission.refill`).",
    ),
    Metric("rollout/groups_replaced_share", "share", "last", "The same over all groups that finished for the step."),
    Metric(
        "rollout/replaced_reward_mean",
        "reward",
        "mean",
        "Mean reward of the replaced groups: near the largest, prompts are too easy; near the smallest, too hard.",
    ),
    Metric("rollout/replaced_tokens", "tokens", "sum", "Response tokens of the replaced groups."),
    Metric(
        "rollout/failed_length_mean",
        "tokens",
        "mean",
        "Mean number of response tokens that the samples of groups had which failed in rollout, for example at their "
        "deadline.",
        True,
    ),
    Metric("rollout/failed_length_max", "tokens", "max", "The same, longest.", True),
    Metric("rollout/queue_depth", "groups", "last", "Finished groups waiting when the batch was taken."),
    Metric("rollout/groups_reusable", "groups", "last", "Trained groups in the queue that may be trained again."),
    Metric("rollout/generate_seconds_p50", "s", "last", "Time to generate one sample, median.", True),
    Metric("rollout/generate_seconds_p95", "s", "last", "The same, 95th percentile.", True),
    Metric("rollout/generate_seconds_p99", "s", "last", "The same, 99th percentile.", True),
    Metric("rollout/generate_seconds_max", "s", "max", "The same, slowest sample.", True),
    Metric("rollout/reward_seconds_mean", "s", "mean", "Time to score one sample.", True),
    Metric("rollout/reward_seconds_max", "s", "max", "The same, slowest sample.", True),
    Metric("rollout/teacher_seconds_mean", "s", "mean", "Time in which a teacher's engines score a group.", True),
    Metric("rollout/teacher_seconds_max", "s", "max", "The same, slowest group.", True),
    Metric(
        "rollout/idle_ratio",
        "share",
        "last",
        "Share of the time since the batch before was complete in which no engine ran for training.",
        True,
    ),
    Metric("rollout/engine_seconds", "s", "sum", "Wall time in which at least one engine ran for training.", True),
    Metric(
        "rollout/replica_tokens_per_second/{replica}",
        "tokens/s",
        "last",
        "Response tokens that an engine has reported since the batch before, those of evaluations and of the door "
        "included, over the time in which it had work up to its last report. None if it has reported no token; that "
        "time counts with its next tokens.",
        True,
    ),
    Metric("rollout/replica_tokens_per_second_min", "tokens/s", "min", "The same, slowest engine.", True),
    Metric("rollout/replica_tokens_per_second_max", "tokens/s", "max", "The same, fastest engine.", True),
    Metric("rollout/continued", "responses", "sum", "Responses finished by another engine: theirs was lost.", True),
    Metric("rollout/kv_usage_max", "share", "max", "Largest share of an engine's KV cache in use.", True),
    Metric("rollout/running_max", "requests", "max", "Most requests in the batch of one engine.", True),
    Metric("rollout/waiting_max", "requests", "max", "Most requests without a place in an engine's batch.", True),
    Metric("rollout/cut", "responses", "sum", "Responses cut at their group's deadline.", True),
    Metric(
        "rollout/groups_kept", "groups", "sum", "Groups from before a resume, used again or continued.", faults=True
    ),
    Metric(
        "rollout/prefetch_seconds",
        "s",
        "sum",
        "Time to plan, fetch and pack the batch in a thread, if generation runs ahead or log-probs are computed in "
        "idle time. `time/generate` contains the part of it for which the trainer waited.",
        True,
    ),
    Metric("rollout/replicas_alive", "replicas", "last", "Replicas that work.", faults=True),
    Metric(
        "rollout/rebuilds",
        "times",
        "last",
        "How often the pool has started controller and queue anew, because one of them had died.",
        faults=True,
    ),
    Metric(
        "rollout/workers_alive",
        "workers",
        "last",
        "Agent workers that run; none with `rollout.agent_workers: 0`.",
        faults=True,
    ),
    Metric(
        "rollout/workers_lost",
        "workers",
        "sum",
        "Agent workers that died or did not answer, and were replaced.",
        faults=True,
    ),
    Metric(
        "rollout/groups_redone",
        "groups",
        "sum",
        "Groups that another agent worker went on with: theirs was lost.",
        faults=True,
    ),
    Metric("rollout/replicas_lost", "replicas", "last", "Replicas that the next publication replaces.", faults=True),
    Metric(
        "rollout/replicas_idle",
        "replicas",
        "last",
        "Replicas that are started, wait for their first weights, or are drained (`megarl pool`).",
        faults=True,
    ),
]

_POLICY = [
    Metric("policy/loss", "loss", "mean", "The objective that was differentiated, mean over mini-batches."),
    Metric("policy/policy_loss", "loss", "mean", "Its policy-gradient part, without KL, entropy and cross-entropy."),
    Metric("policy/entropy", "nats", "weighted", "Entropy of the policy per token; see `telemetry.entropy_every`."),
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
    Metric("policy/moe_z_loss", "loss", "mean", "MoE router z-loss without its coefficient."),
    Metric("policy/advantage_mean", "1", "mean", "Mean advantage of the trained samples."),
    Metric("policy/advantage_std", "1", "mean", "Standard deviation of the trained samples' advantages."),
]

_AGENT = [
    Metric("agent/turns_mean", "turns", "mean", "Turns of the model per trajectory of an agent."),
    Metric("agent/turns_max", "turns", "max", "The most turns of a trajectory."),
    Metric(
        "agent/tool_calls_mean", "calls", "mean", "Calls of tools per trajectory, those answered with an error too."
    ),
    Metric("agent/tool_errors", "calls", "sum", "Calls that were answered with an error."),
    Metric("agent/malformed_calls", "calls", "sum", "Calls that could not be read."),
    Metric(
        "agent/overflows",
        "samples",
        "sum",
        "Trajectories that ended because a tool's answer, or a prompt, did not fit.",
    ),
    Metric("agent/tool_seconds_mean", "s", "mean", "Time of one call.", True),
    Metric("agent/tool_seconds_max", "s", "max", "The longest call.", True),
]

_CORRECTION = [
    Metric("correction/weight_mean", "1", "weighted", "Mean weight; 1 where trainer and engine agree."),
    Metric("correction/weight_max", "1", "max", "Largest weight."),
    Metric("correction/capped_share", "share", "weighted", "Share of tokens whose weight was cut at the cap."),
    Metric(
        "correction/masked_share",
        "share",
        "weighted",
        "Share of tokens that take no part: outside the band of the weight, or left out by a mask.",
    ),
    Metric(
        "correction/ess",
        "share",
        "weighted",
        "Relative effective sample size of the weights, masked tokens with 0; 1 if all are equal.",
    ),
    Metric(
        "correction/sequence_ess", "share", "weighted", "The same of the sequences, each by its tokens' mean weight."
    ),
    Metric(
        "correction/capped_sequences_share", "share", "weighted", "Share of sequences with a token that was capped."
    ),
    Metric("correction/masked_sequences_share", "share", "weighted", "Share of sequences with a token that is masked."),
    Metric("correction/dropped_sequences_share", "share", "weighted", "Share of sequences that are masked as a whole."),
    Metric(
        "correction/{mask}/rejected_share",
        "share",
        "weighted",
        "Share of tokens that one of `algorithm.correction.masks` leaves out by itself.",
    ),
    Metric(
        "correction/{mask}/largest",
        "nats",
        "max",
        "Largest size of what this mask bounds, over tokens or sequences: of an estimate of the KL, or of the "
        "logarithm of a ratio.",
    ),
]

_MISMATCH = [
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
        "Tokens whose weights were so many updates older than those they are compared with; the last of 16 lags has "
        "all older ones.",
    ),
    Metric("mismatch/lag/{lag}/logprob_abs_diff", "nats", "weighted", "Mean |engine - trainer| over them."),
    Metric("mismatch/lag/{lag}/k3_kl", "nats", "weighted", "k3 estimate of KL(engine || trainer) over them."),
    Metric("mismatch/lag/{lag}/ess", "share", "weighted", "Relative effective sample size over them."),
    Metric(
        "mismatch/replica/{replica}/tokens",
        "tokens",
        "sum",
        "Tokens that the engine of this replica sampled; of 32 replicas at most.",
    ),
    Metric(
        "mismatch/replica/{replica}/logprob_abs_diff",
        "nats",
        "weighted",
        "Mean |engine - trainer| over them, at all lags.",
    ),
]

_MONITOR = [
    Metric("monitor/alarms", "alarms", "sum", "Alarms in the step, those that have gone on for a while included."),
    Metric("monitor/active", "alarms", "last", "Rules, for each replica its own, that are in alarm after the step."),
    Metric("monitor/skipped", "steps", "sum", "1 if an alarm has kept the batch from the update."),
    Metric("monitor/forced_syncs", "syncs", "sum", "1 if an alarm has had the weights published after the step."),
    Metric("monitor/quarantined", "replicas", "sum", "Replicas that alarms have taken out after the step."),
    Metric(
        "monitor/logprob_gap",
        "nats",
        "last",
        "Mean |engine - trainer| of the tokens of the smallest version lag that has `monitor.min_tokens`, divided by "
        "1 + lag.",
    ),
    Metric(
        "monitor/replica_gap_max",
        "ratio",
        "last",
        "Mean |engine - trainer| of a replica over that of the median of the others at equal lags; the largest of all "
        "replicas. None with one replica.",
    ),
    Metric(
        "monitor/no_signal_share",
        "share",
        "last",
        "Filtered groups, those that rollout replaced included, over trained and filtered ones.",
    ),
]

_SYNC = [
    Metric(
        "sync/seconds",
        "s",
        "sum",
        "The attempt that published: gathers, broadcasts, loads and calls; no failed attempts, no restarts of engines.",
        True,
    ),
    Metric("sync/pause_seconds", "s", "sum", "From the first call of a pause to the last replica's resume.", True),
    Metric("sync/digest_seconds", "s", "sum", "Computing and comparing digests.", True),
    Metric("sync/bytes", "B", "sum", "Bytes each engine received."),
    Metric("sync/buckets", "buckets", "sum", "Buckets sent."),
    Metric("sync/version", "version", "last", "Version published."),
    Metric("sync/restarted_replicas", "replicas", "sum", "Replicas replaced because they failed a sync.", faults=True),
]

_TIME = [
    Metric("time/step", "s", "sum", "Wall time of the step, without evaluation.", True),
    Metric(
        "time/generate",
        "s",
        "sum",
        "Time the trainer waited for rollouts; if generation runs ahead, for the batch that a thread prepares. Without "
        "the log-prob passes that it made meanwhile.",
        True,
    ),
    Metric(
        "time/queue",
        "s",
        "sum",
        "Time the trainer waited for tags and rows, and their way to the ranks. If a thread fetches them, that wait is "
        "part of `time/generate`.",
        True,
    ),
    Metric("time/logprobs", "s", "sum", "Old-policy and reference passes, those made in idle time included.", True),
    Metric("time/update", "s", "sum", "Forward, backward and optimizer.", True),
    Metric(
        "time/drain",
        "s",
        "sum",
        "Time the trainer waited before a publication until running responses had ended; 0 with "
        "`rollout.partial_rollout`.",
        True,
    ),
    Metric("time/sync", "s", "sum", "Weight sync.", True),
    Metric("time/eval", "s", "sum", "Evaluation; not part of `time/step`.", True),
    Metric("time/save", "s", "sum", "Time the loop waited for a save or an export.", True),
    Metric("time/other", "s", "sum", "Time outside all phases above.", True),
    Metric(
        "time/overhead",
        "s",
        "sum",
        "`time/step` minus engine, log-prob, update and sync time. `perf/idle_logprobs_seconds`, in which engines ran "
        "beside the trainer, are taken off the engine time.",
        True,
    ),
    Metric("time/overhead_share", "share", "last", "`time/overhead` over `time/step`.", True),
    Metric("time/trainer_idle_ratio", "share", "last", "`time/generate` and `time/drain` over `time/step`.", True),
    Metric(
        "time/eta",
        "s",
        "last",
        "Estimated time to the end of the run, by the steps since its last start, without start-up.",
        True,
    ),
]

_PERF = [
    Metric(
        "perf/trainer_tokens_per_second",
        "tokens/s",
        "last",
        "Trained tokens over log-prob and update time.",
        True,
    ),
    Metric("perf/rollout_tokens_per_second", "tokens/s", "last", "Response tokens over engine seconds.", True),
    Metric("perf/tokens_per_second", "tokens/s", "last", "Trained tokens over `time/step`.", True),
    Metric(
        "perf/trainer_tokens_per_second_per_gpu",
        "tokens/s",
        "last",
        "Per trainer GPU (process on CPU).",
        True,
    ),
    Metric("perf/rollout_tokens_per_second_per_gpu", "tokens/s", "last", "Per rollout GPU (engine on CPU).", True),
    Metric("perf/tokens_per_second_per_gpu", "tokens/s", "last", "Whole job, GPUs of both pools counted.", True),
    Metric(
        "perf/trainer_tflops_per_gpu",
        "TFLOP/s",
        "last",
        "Model FLOPs of log-prob and update passes, recompute not counted, per GPU.",
        True,
    ),
    Metric("perf/trainer_mfu", "share", "last", "The same over the GPU's dense peak, where that is known.", True),
    Metric(
        "perf/trainer_peak_memory_gib",
        "GiB",
        "max",
        "Peak device memory (resident memory on CPU) of the trainer rank with the most.",
        True,
    ),
    Metric(
        "perf/idle_logprobs_samples_share",
        "share",
        "last",
        "Share of the step's old-policy and reference passes over its samples that were made while the trainer waited "
        "for the batch (`trainer.idle_logprobs`).",
        True,
    ),
    Metric("perf/idle_logprobs_tokens_share", "share", "last", "The same by tokens, prompts included.", True),
    Metric(
        "perf/idle_logprobs_seconds",
        "s",
        "sum",
        "Part of `time/logprobs` that passes in idle time took, those in vain included. The last one may end after the "
        "batch has come.",
        True,
    ),
    Metric("perf/host_memory_gib", "GiB", "max", "Resident memory of a trainer rank.", True),
]

_EVAL = [
    Metric("eval/step", "steps", "last", "Steps done when the evaluation began."),
    Metric("eval/version", "version", "last", "Version of the weights with which the evaluation began."),
    Metric("eval/oldest_version", "version", "last", "Oldest version of a token of its responses."),
    Metric(
        "eval/newest_version",
        "version",
        "last",
        "Newest version of a token; above the oldest if the trainer went on (`evaluation.concurrent`).",
    ),
    Metric("eval/{set}/greedy", "share", "last", "Accuracy at temperature 0."),
    Metric("eval/{set}/sampled", "share", "last", "mean@k at `evaluation.sampling`."),
    Metric("eval/{set}/greedy_low", "share", "last", "Lower end of the 95% interval."),
    Metric("eval/{set}/greedy_high", "share", "last", "Upper end of the 95% interval."),
    Metric("eval/{set}/sampled_low", "share", "last", "Lower end of the 95% interval."),
    Metric("eval/{set}/sampled_high", "share", "last", "Upper end of the 95% interval."),
    Metric("eval/{set}/pass@{k}", "share", "last", "Unbiased pass@k of the sampled responses."),
    Metric("eval/{set}/maj@{k}", "share", "last", "Majority vote of the k sampled responses."),
    Metric("eval/{set}/n", "problems", "last", "Problems in the set."),
    Metric("eval/{set}/parsed", "share", "last", "Share of greedy responses with an answer that parses."),
    Metric("eval/{set}/length_mean", "tokens", "last", "Mean length of the greedy responses."),
    Metric("eval/{set}/truncated_share", "share", "last", "Share of greedy responses cut at the limit."),
    Metric(
        "eval/{set}/failed_generations",
        "responses",
        "last",
        "Greedy and sampled responses that the engine aborted or returned without finite log-probs.",
    ),
    Metric(
        "eval/{set}/reward_errors",
        "responses",
        "last",
        "Greedy and sampled responses whose reward function failed; scored `reward.on_error`, 0 with `drop`.",
    ),
]

_TOTAL = [
    Metric("total/groups_admitted", "groups", "last", "Groups admitted."),
    Metric("total/groups_trained", "groups", "last", "Groups trained on."),
    Metric("total/groups_filtered", "groups", "last", "Groups filtered."),
    Metric("total/groups_dropped_stale", "groups", "last", "Groups dropped as stale."),
    Metric("total/groups_failed", "groups", "last", "Groups failed."),
    Metric("total/groups_reused", "groups", "last", "Further uses of trained groups."),
    Metric(
        "total/groups_rolled_back",
        "groups",
        "last",
        "Groups that were started and then discarded by a resume; not in the other totals, because they are redrawn.",
        faults=True,
    ),
    Metric(
        "total/failed_writes",
        "writes",
        "last",
        "Writes of metrics, samples or the summary that the file system or a service has refused in this start of the "
        "run; lines of `metrics.jsonl` and `samples.jsonl` wait and are written later.",
        faults=True,
    ),
    Metric(
        "total/lost_events",
        "events",
        "last",
        "Events that trainer rank 0 could not write in this start of the run, because its disk was slow, full or away; "
        "the other processes count theirs in `RUN_DIR/events`.",
        True,
    ),
    Metric("total/trained_samples", "samples", "last", "Samples trained on."),
    Metric("total/trained_tokens", "tokens", "last", "Tokens trained on."),
    Metric("total/wall_seconds", "s", "last", "Wall time since the start.", True),
]

_TRAINING = [*_REWARD, *_GROUPS, *_BATCH, *_DATA, *_ROLLOUT, *_AGENT, *_POLICY, *_CORRECTION, *_MISMATCH, *_MONITOR]

REGISTRY = Registry([*_TRAINING, *_SYNC, *_TIME, *_PERF, *_EVAL, *_TOTAL])


def step_metrics() -> StepMetrics:
    """Return an empty collector that uses megarl's registry."""
    return StepMetrics(REGISTRY)
