"""Tells people about samples whose reward function failed: the first ones at once, later ones ever more rarely."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from megarl.rewards.types import ErrorReason, OnError
from megarl.rewards.worker_protocol import RewardAnswer

# The rule that ends a run whose reward function fails for too many samples. Pure.

WINDOW = 64  # latest samples of a function; of fewer, all


class ErrorLimit:
    """Counts the failures among the latest samples of one reward function.

    The limit is passed when at least `min_errors` of the latest `WINDOW` samples have failed (of the latest
    `min_errors`, if these are more), and they are a larger share than `max_share` of them.
    """

    def __init__(self, max_share: float, min_errors: int) -> None:
        self._max_share, self._min_errors = max_share, min_errors
        self._failed: deque[bool] = deque(maxlen=max(WINDOW, min_errors))
        self.errors = 0  # of all samples

    def note(self, failed: bool) -> bool:
        """Record one sample; return whether the limit is passed."""
        self.errors += failed
        self._failed.append(failed)
        recent = sum(self._failed)
        return failed and recent >= self._min_errors and recent > self._max_share * len(self._failed)

    @property
    def recent(self) -> str:
        """The failures among the latest samples, as text."""
        return f"{sum(self._failed)} of the latest {len(self._failed)} samples"


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailureMessage:
    """A message about failures: for people at once, or for the log alone."""

    text: str
    at_once: bool


class ErrorReport:
    """Counts the failures of one reward function, and reports some of them.

    The first failure of each reason goes to `report`, with the end of the function's own traceback; later the 10th,
    100th, 1000th ... failure of the function. Of the others, the log has the 2nd, 4th, 8th ... of each reason.
    """

    def __init__(self, function: str, on_error: OnError, report: Callable[[str], None]) -> None:
        self._function, self._report = function, report
        dropped = on_error == "drop"
        self._what = "such samples are not trained on" if dropped else f"such samples get the reward {on_error:g}"
        self._reasons: Counter[ErrorReason] = Counter()

    @property
    def by_reason(self) -> dict[ErrorReason, int]:
        """The number of failures for each reason."""
        return dict(self._reasons)

    def count(self, answer: RewardAnswer) -> FailureMessage | None:
        """Count a failure; return the message for `tell` if it is one of those that are reported."""
        assert answer.reason is not None  # of an answer without a result
        self._reasons[answer.reason] += 1
        count, total = self._reasons[answer.reason], self._reasons.total()
        name, text = f"reward function {self._function}", f"{answer.reason} no. {count}: {answer.message}"
        if count == 1:
            trace = f"\n{answer.trace}" if answer.trace else ""
            return FailureMessage(f"{name}: {text}; {self._what}{trace}", at_once=True)
        if str(total).strip("0") == "1":
            return FailureMessage(f"{name} has failed for {total} samples; the latest: {text}", at_once=True)
        return FailureMessage(f"{name}: {text}", at_once=False) if count & (count - 1) == 0 else None

    def tell(self, message: FailureMessage) -> None:
        """Report a message, or log it. It may wait for a file, so no lock should be held."""
        if message.at_once:
            self._report(message.text)
        else:
            log.warning("%s", message.text)
