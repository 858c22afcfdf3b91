"""Metrics of time and memory: weight sync, the phases of a step, throughput."""

from megarl.telemetry.metrics.registry import Metric

SYNC = [
    Metric(
        "sync/seconds",
        "s",
        "sum",
        "The successful attempt: gathers, broadcasts, loads and calls, without failed attempts or restarts of engines.",
        True,
    ),
    Metric("sync/pause_seconds", "s", "sum", "From the first call of a pause to the last replica's resume.", True),
    Metric("sync/digest_seconds", "s", "sum", "Computing and comparing digests.", True),
    Metric("sync/bytes", "B", "sum", "Bytes each engine received."),
    Metric("sync/buckets", "buckets", "sum", "Buckets sent."),
    Metric("sync/version", "version", "last", "Version published."),
    Metric(
        "sync/restarted_replicas",
        "replicas",
        "sum",
        "Replicas replaced because they failed a sync, or failed to join its group.",
        faults=True,
    ),
]

TIME = [
    Metric("time/step", "s", "sum", "Wall time of the step, without evaluation.", True),
    Metric(
        "time/generate",
        "s",
        "sum",
        "Time the trainer waited for rollouts or, if generation runs ahead, for the batch that a thread prepares.",
        True,
    ),
    Metric(
        "time/queue",
        "s",
        "sum",
        "Time the trainer waited for tags and rows and distributed them to the ranks. If a thread fetches them, this "
        "is part of `time/generate`.",
        True,
    ),
    Metric("time/logprobs", "s", "sum", "Old-policy and reference passes.", True),
    Metric("time/update", "s", "sum", "Forward, backward and optimizer.", True),
    Metric(
        "time/drain",
        "s",
        "sum",
        "Time the trainer waited before a publication for running responses to end; 0 with `rollout.partial_rollout`.",
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
        "`time/step` minus engine, log-prob, update and sync time.",
        True,
    ),
    Metric("time/overhead_share", "share", "last", "`time/overhead` over `time/step`.", True),
    Metric("time/trainer_idle_ratio", "share", "last", "`time/generate` and `time/drain` over `time/step`.", True),
    Metric(
        "time/eta",
        "s",
        "last",
        "Estimated time to the end of the run, from the steps since its last start, without start-up.",
        True,
    ),
]

PERF = [
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
        "Largest peak device memory (resident memory on CPU) of a trainer rank.",
        True,
    ),
    Metric("perf/host_memory_gib", "GiB", "max", "Resident memory of a trainer rank.", True),
    Metric(
        "perf/engine_residue_gib",
        "GiB",
        "max",
        "With `rollout.share_gpus`: GPU memory in use after the engine went to sleep, while the trainer is parked; on "
        "a CPU the growth of the worker's memory since before it built the model. The largest of all.",
        True,
    ),
    Metric(
        "perf/trainer_residue_gib",
        "GiB",
        "max",
        "With `rollout.share_gpus`: GPU memory of torch's allocator while the trainer is parked; on a CPU the growth "
        "of the rank's memory since before it built the policy. The largest of all ranks.",
        True,
    ),
]
