"""The failures of a reward function: when they end the run, and which of them people are told of."""

from __future__ import annotations

from collections import Counter, deque

from megarl.rewards.process import RewardAnswer
from megarl.rewards.types import ErrorReason, OnError

WINDOW = 64  # latest samples of a function; of fewer, all


class Failures:
    """Counts the failures of one reward function. Pure.

    They are too many when at least `min_errors` of the latest `WINDOW` samples have failed (of the latest `min_errors`,
    if these are more), and they are a larger share than `max_share` of them.
    """

    def __init__(self, function: str, on_error: OnError, max_share: float, min_errors: int) -> None:
        self._function, self._max_share, self._min_errors = function, max_share, min_errors
        dropped = on_error == "drop"
        self._what = "such samples are not trained on" if dropped else f"such samples get the reward {on_error:g}"
        self._failed: deque[bool] = deque(maxlen=max(WINDOW, min_errors))
        self.by_reason: Counter[ErrorReason] = Counter()

    def note(self, reason: ErrorReason | None) -> bool:
        """Record one sample, which has failed if there is a reason; return whether there are too many failures."""
        self._failed.append(reason is not None)
        if reason is None:
            return False
        self.by_reason[reason] += 1
        recent = sum(self._failed)
        return recent >= self._min_errors and recent > self._max_share * len(self._failed)

    @property
    def recent(self) -> str:
        """The failures among the latest samples, as text."""
        return f"{sum(self._failed)} of the latest {len(self._failed)} samples"

    def message(self, answer: RewardAnswer) -> tuple[str, bool]:
        """Return what to say of the failure noted last, "" if nothing, and whether people should see it at once.

        They see the first failure of each reason, with the end of the function's own traceback, and later the 10th,
        100th, 1000th ... failure of the function. Of the others, the log has the 2nd, 4th, 8th ... of each reason.
        """
        assert answer.reason is not None  # of an answer without a result
        count, total = self.by_reason[answer.reason], self.by_reason.total()
        name, text = f"reward function {self._function}", f"{answer.reason} no. {count}: {answer.message}"
        if count == 1:
            trace = f"\n{answer.trace}" if answer.trace else ""
            return f"{name}: {text}; {self._what}{trace}", True
        if str(total).strip("0") == "1":
            return f"{name} has failed for {total} samples; the latest: {text}", True
        return (f"{name}: {text}" if count & (count - 1) == 0 else ""), False
