"""Records of checkpoints as earlier releases wrote them.

They have the keys of commit e41680d (`_record` of its session and `_own_record` of its checkpointer), whose version of
the weights was the step.
"""

SUMMARY = {
    "steps": 3,
    "wall_seconds": 61.5,
    "totals": {"batch/trained_samples": 48.0, "time/step": 30.0},
    "logprob": {"first": {"mean": 1e-7, "max": 1e-5}, "last": {"mean": 2e-7, "max": 2e-5}},
    "eval": {"before": {"greedy": 0.25, "sampled": 0.5, "n": 8}, "after": None},
}
TOTALS = {
    "groups_admitted": 12.0,
    "groups_trained": 9.0,
    "groups_filtered": 2.0,
    "groups_dropped_stale": 0.0,
    "groups_failed": 1.0,
    "trained_samples": 36.0,
    "trained_tokens": 432.0,
}
ROLLOUT = {
    "admission": {
        "steps": 3,
        "done": {"trained": 9, "filtered": 2, "dropped_stale": 0, "failed": 1},
        "version": 3,
        "next_group": 12,
        "unsettled": [],
        "attempts": 12,
    },
    "source": {"n": 32, "seed": 0, "shuffle": True, "drawn": 12},
}
OLD_RECORD = {
    "format": 1,
    "step": 3,
    "version": 3,
    "rollout": ROLLOUT,
    "summary": SUMMARY,
    "totals": TOTALS,
    "files": {"metrics.jsonl": 5120, "samples.jsonl": 2048},
    "metrics": {"eval/held_out/greedy": 0.5},
}
