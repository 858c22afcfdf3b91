"""RUN_DIR/summary.json: the main results of a run."""

import time
from collections.abc import Callable, Mapping
from typing import Any

_SUMMED = (
    "batch/trained_samples",
    "batch/trained_tokens",
    "batch/response_tokens",
    "batch/reused_tokens",
    "rollout/replaced_tokens",
    "reward/errors",
    "time/logprobs",
    "time/update",
    "time/step",
    "time/overhead",
    "rollout/engine_seconds",
)
_LOGPROB_DIFF = {"mean": "mismatch/logprob_abs_diff_mean", "max": "mismatch/logprob_abs_diff_max"}


class RunSummary:
    """Accumulates the summary of a run from the reduced metrics of each step.

    Throughput is total tokens divided by the busy seconds of that side: trained tokens by log-prob and update time,
    response tokens by engine time. `loop_overhead_share` is total overhead divided by total step time.
    """

    key = "summary"  # the name of its state in a checkpoint

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._totals: dict[str, float] = {}
        self._logprob: dict[str, dict[str, float]] = {}
        self._eval: dict[str, dict[str, float] | None] = {"before": None, "after": None}
        self._before_s = 0.0
        self._rolled_back = 0
        self.steps = 0
        self.failed_saves = 0  # of this start of the run

    @property
    def wall_seconds(self) -> float:
        """Seconds since this object was made, plus those before the resume."""
        return self._before_s + self._clock() - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON content."""
        return {
            "steps": self.steps,
            "wall_seconds": self.wall_seconds,
            "totals": dict(self._totals),
            "logprob": dict(self._logprob),
            "eval": dict(self._eval),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.steps, self._before_s = int(state["steps"]), float(state["wall_seconds"])
        self._totals, self._logprob, self._eval = dict(state["totals"]), dict(state["logprob"]), dict(state["eval"])

    def step(self, values: Mapping[str, float]) -> None:
        """Add the metrics of one finished step, by their declared names; missing ones count as 0."""
        self.steps += 1
        for name in _SUMMED:
            self._totals[name] = self._totals.get(name, 0.0) + values.get(name, 0.0)
        self._rolled_back = int(values.get("total/groups_rolled_back", self._rolled_back))
        if all(name in values for name in _LOGPROB_DIFF.values()):
            measured = {key: values[name] for key, name in _LOGPROB_DIFF.items()}
            self._logprob.setdefault("first", measured)
            self._logprob["last"] = measured

    def evaluation(self, label: str, greedy: float, sampled: float, n: int, reward_errors: int = 0) -> None:
        """Record the mean scores of the first set over `n` problems, and the number of responses without a reward.

        `label`: `before` (the first step), `after` (the last step), or any other.
        """
        name = label if label in ("before", "after") else "latest"
        self._eval[name] = {"greedy": greedy, "sampled": sampled, "n": n, "reward_errors": reward_errors}

    def as_dict(self, exit_status: str) -> dict[str, Any]:
        """Return the content of summary.json; values that were not measured are None."""
        total = self._totals.get
        trainer = _rate(total("batch/trained_tokens", 0.0), total("time/logprobs", 0.0) + total("time/update", 0.0))
        new = total("batch/response_tokens", 0.0) - total("batch/reused_tokens", 0.0)
        rollout = _rate(new + total("rollout/replaced_tokens", 0.0), total("rollout/engine_seconds", 0.0))
        empty = {"mean": None, "max": None}
        return {
            "steps": self.steps,
            "wall_seconds": round(self.wall_seconds, 3),
            "eval_before": self._eval["before"],
            "eval_after": self._eval["after"],
            **({"eval_latest": self._eval["latest"]} if self._eval.get("latest") else {}),
            "trained_samples": int(total("batch/trained_samples", 0.0)),
            "reward_errors": int(total("reward/errors", 0.0)),
            "tokens_per_second": {"trainer": trainer, "rollout": rollout},
            "loop_overhead_share": _rate(total("time/overhead", 0.0), total("time/step", 0.0)),
            "logprob_abs_diff": {key: self._logprob.get(key, empty) for key in ("first", "last")},
            "exit": exit_status,
            **({"groups_rolled_back": self._rolled_back} if self._rolled_back else {}),
            **({"failed_saves": self.failed_saves} if self.failed_saves else {}),
        }


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None
