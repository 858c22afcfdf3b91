"""Evaluates one set, greedy and sampled, in training runs and in `megarl eval`.

The function that generates and scores a response is a parameter, so this module needs neither an engine nor Ray.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megarl.common.errors import first_exception
from megarl.evaluation.accuracy import EvalReport, ScoredResponse, evaluate_responses

Problem = TypeVar("Problem")
Mode = Literal["greedy", "sampled"]
Respond = Callable[[Problem, int, Mode, int], Coroutine[Any, Any, ScoredResponse]]
"""(problem, its index in the set, mode, sample index) -> scored response. The greedy sample has index 0."""


@dataclass(frozen=True)
class SetReport:
    """Both evaluations of one set.

    `version`: of the weights at its start; `oldest`, `newest`: of the tokens, which differ from it only if training
    continued meanwhile.
    """

    name: str
    version: int
    greedy: EvalReport
    sampled: EvalReport
    oldest: int
    newest: int

    @property
    def n(self) -> int:
        """The number of problems."""
        return self.greedy.problems

    @property
    def responses(self) -> int:
        """The number of greedy and sampled responses."""
        return self.greedy.responses + self.sampled.responses

    @property
    def first_failure(self) -> str | None:
        """The message of the first failed response, preferably a greedy one."""
        return self.greedy.first_failure or self.sampled.first_failure

    @property
    def failed_generations(self) -> int:
        """The number of greedy and sampled responses that the engine did not finish."""
        return self.greedy.failed_generations + self.sampled.failed_generations

    @property
    def reward_errors(self) -> int:
        """The number of greedy and sampled responses whose reward function failed."""
        return self.greedy.reward_errors + self.sampled.reward_errors

    @property
    def of_one_version(self) -> bool:
        """True if all tokens have `version`."""
        return self.oldest == self.newest == self.version

    @property
    def nothing_judged(self) -> str | None:
        """The error message if every response of the set failed, else None."""
        responses = self.responses
        if self.greedy.failures + self.sampled.failures < responses:
            return None
        return (
            f"all {responses} responses of set {self.name!r} failed ({self.failed_generations} generations, "
            f"{self.reward_errors} rewards), so its figures mean nothing; the first: {self.greedy.first_failure}"
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics `eval/{set}/…`."""
        prefix, greedy, sampled = f"eval/{self.name}", self.greedy, self.sampled
        return {
            f"{prefix}/greedy": greedy.mean.value,
            f"{prefix}/greedy_low": greedy.mean.low,
            f"{prefix}/greedy_high": greedy.mean.high,
            f"{prefix}/sampled": sampled.mean.value,
            f"{prefix}/sampled_low": sampled.mean.low,
            f"{prefix}/sampled_high": sampled.mean.high,
            **{f"{prefix}/pass@{k}": each.value for k, each in sampled.pass_at.items()},
            f"{prefix}/maj@{sampled.samples_per_problem}": sampled.majority.value,
            f"{prefix}/graded": float(greedy.graded or sampled.graded),
            f"{prefix}/n": self.n,
            f"{prefix}/parsed": greedy.parsed_share,
            f"{prefix}/length_mean": greedy.mean_tokens,
            f"{prefix}/truncated_share": greedy.truncated_share,
            f"{prefix}/failed_generations": self.failed_generations,
            f"{prefix}/reward_errors": self.reward_errors,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return both reports as JSON content."""
        return {
            "name": self.name,
            "version": self.version,
            "versions": [self.oldest, self.newest],
            "greedy": self.greedy.to_dict(),
            "sampled": self.sampled.to_dict(),
        }


async def evaluate_set(
    name: str, problems: Sequence[Problem], respond: Respond[Problem], *, samples: int, version: int
) -> SetReport:
    """Request one greedy and `samples` sampled responses to every problem, all concurrently, and report on them.

    The first exception of `respond` cancels the other requests and is raised. Raises ValueError for an empty set.
    """
    if not problems:
        raise ValueError(f"evaluation set {name!r} is empty: add problems to it")
    modes: list[tuple[Mode, int]] = [("greedy", 0), *(("sampled", index) for index in range(samples))]
    try:
        async with asyncio.TaskGroup() as tasks:
            requests = [
                [tasks.create_task(respond(problem, index, *mode)) for mode in modes]
                for index, problem in enumerate(problems)
            ]
    except* Exception as group:
        raise first_exception(group) from None
    answers = [[task.result() for task in row] for row in requests]
    return SetReport(
        name=name,
        version=version,
        greedy=evaluate_responses(f"{name} greedy", [row[:1] for row in answers]),
        sampled=evaluate_responses(f"{name} sampled", [row[1:] for row in answers]),
        oldest=version,
        newest=version,
    )
