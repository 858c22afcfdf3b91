"""Metrics of generation: engines, versions, lost parts, and agents with their tools."""

from megarl.telemetry.metrics.registry import Metric

ROLLOUT = [
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
        "Mean number of response tokens in the samples of groups that failed in rollout, for example at their "
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
        "Share of the time since the previous batch was complete in which no engine ran for training.",
        True,
    ),
    Metric("rollout/engine_seconds", "s", "sum", "Wall time in which at least one engine ran for training.", True),
    Metric(
        "rollout/replica_tokens_per_second/{replica}",
        "tokens/s",
        "last",
        "Response tokens that an engine reported since the previous batch, including evaluations and the gateway, "
        "over its busy time up to its last report. None without a token; the time then counts with its next tokens.",
        True,
    ),
    Metric("rollout/replica_tokens_per_second_min", "tokens/s", "min", "The same, slowest engine.", True),
    Metric("rollout/replica_tokens_per_second_max", "tokens/s", "max", "The same, fastest engine.", True),
    Metric(
        "rollout/continued", "responses", "sum", "Responses that another engine finished because theirs was lost.", True
    ),
    Metric("rollout/kv_usage_max", "share", "max", "Largest share of an engine's KV cache in use.", True),
    Metric("rollout/running_max", "requests", "max", "Most requests in the batch of one engine.", True),
    Metric("rollout/waiting_max", "requests", "max", "Most requests without a place in an engine's batch.", True),
    Metric("rollout/cut", "responses", "sum", "Responses cut at their group's deadline.", True),
    Metric("rollout/groups_kept", "groups", "sum", "Groups from before a resume, reused or continued.", faults=True),
    Metric(
        "rollout/prefetch_seconds",
        "s",
        "sum",
        "Time to plan and fetch the batch in a thread, if generation runs ahead. `time/generate` contains the part "
        "that the trainer waited for.",
        True,
    ),
    Metric("rollout/replicas_alive", "replicas", "last", "Working replicas.", faults=True),
    Metric(
        "rollout/rebuilds",
        "times",
        "last",
        "How often the pool restarted controller and queue because one of them had died.",
        faults=True,
    ),
    Metric(
        "rollout/workers_alive",
        "workers",
        "last",
        "Running agent workers; none with `rollout.agent_workers: 0`.",
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
        "Groups that another agent worker continued because theirs was lost.",
        faults=True,
    ),
    Metric("rollout/replicas_lost", "replicas", "last", "Replicas that the next publication replaces.", faults=True),
    Metric(
        "rollout/replicas_idle",
        "replicas",
        "last",
        "Replicas that are starting, waiting for their first weights, or drained (`megarl pool`).",
        faults=True,
    ),
]

AGENT = [
    Metric("agent/turns_mean", "turns", "mean", "Turns of the model per trajectory of an agent."),
    Metric("agent/turns_max", "turns", "max", "The most turns of a trajectory."),
    Metric(
        "agent/tool_calls_mean",
        "calls",
        "mean",
        "Calls of tools per trajectory, including those answered with an error.",
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
