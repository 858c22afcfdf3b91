"""Metrics of the run as a whole: held-out evaluations, alarms of the monitor, and totals."""

from megarl.telemetry.metrics.registry import Metric

EVAL = [
    Metric("eval/step", "steps", "last", "Steps done when the evaluation began."),
    Metric("eval/version", "version", "last", "Version of the weights when the evaluation began."),
    Metric("eval/oldest_version", "version", "last", "Oldest version of a token of its responses."),
    Metric(
        "eval/newest_version",
        "version",
        "last",
        "Newest version of a token; above the oldest if training continued (`evaluation.concurrent`).",
    ),
    Metric("eval/{set}/greedy", "share", "last", "Mean score at temperature 0: the accuracy, unless `graded`."),
    Metric("eval/{set}/sampled", "share", "last", "mean@k at `evaluation.sampling`."),
    Metric("eval/{set}/graded", "1", "last", "1 if some score is neither 0 nor 1, so means are not accuracies."),
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
        "Greedy and sampled responses whose reward function failed; scored as `reward.on_error`, 0 with `drop`.",
    ),
]

MONITOR = [
    Metric("monitor/alarms", "alarms", "sum", "Alarms in the step, including those that began earlier."),
    Metric("monitor/active", "alarms", "last", "Rules in alarm after the step, counted per replica."),
    Metric("monitor/skipped", "steps", "sum", "1 if an alarm skipped the batch."),
    Metric("monitor/forced_syncs", "syncs", "sum", "1 if an alarm forced a publication after the step."),
    Metric("monitor/quarantined", "replicas", "sum", "Replicas that alarms removed after the step."),
    Metric(
        "monitor/logprob_gap",
        "nats",
        "last",
        "Mean |engine - trainer| over the tokens of the smallest version lag with at least `monitor.min_tokens` "
        "tokens, divided by 1 + lag.",
    ),
    Metric(
        "monitor/replica_gap_max",
        "ratio",
        "last",
        "Mean |engine - trainer| of a replica over the median of the others at equal lags; the largest of all "
        "replicas. None with one replica.",
    ),
    Metric(
        "monitor/no_signal_share",
        "share",
        "last",
        "Filtered groups, including those that rollout replaced, over trained and filtered ones.",
    ),
]

TOTAL = [
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
        "Started groups that a resume discarded; not in the other totals, because they are drawn again.",
        faults=True,
    ),
    Metric(
        "total/failed_writes",
        "writes",
        "last",
        "Failed writes of metrics, samples or the summary to disk or a service since this start of the run; lines of "
        "`metrics.jsonl` and `samples.jsonl` are written later.",
        faults=True,
    ),
    Metric(
        "total/lost_events",
        "events",
        "last",
        "Events that trainer rank 0 lost since this start of the run because its disk was slow, full or unreachable. "
        "Other processes count theirs in `RUN_DIR/events`.",
        True,
    ),
    Metric("total/trained_samples", "samples", "last", "Samples trained on."),
    Metric("total/trained_tokens", "tokens", "last", "Tokens trained on."),
    Metric("total/wall_seconds", "s", "last", "Wall time since the start.", True),
]
