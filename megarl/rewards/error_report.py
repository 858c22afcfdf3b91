"""Tells people about samples whose reward function failed: the first ones at once, later ones ever more rarely."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from megarl.rewards.answers import RewardAnswer
from megarl.rewards.types import ErrorReason, OnError

log = logging.getLogger(__name__)


class ErrorReport:
    """Reports the failures of one reward function.

    The first failure of each reason goes to `report` at once, with the end of the function's own traceback; later the
    10th, 100th, 1000th ... failure of the function. The log has the 1st, 2nd, 4th, 8th ... of each reason.
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

    def note(self, answer: RewardAnswer) -> None:
        """Report a failure, if it is one of those that are."""
        assert answer.reason is not None  # of an answer without a result
        self._reasons[answer.reason] += 1
        count, total = self._reasons[answer.reason], self._reasons.total()
        text = f"reward function {self._function}: {answer.reason} no. {count}: {answer.message}"
        if count & (count - 1) == 0:
            log.warning("%s", text)
        if count == 1:
            self._report(f"{text}; {self._what}" + (f"\n{answer.trace}" if answer.trace else ""))
        elif str(total).strip("0") == "1":
            self._report(f"reward function {self._function} has failed for {total} samples; the latest: {text}")
