"""Requests to a teacher's engine about the samples of a group, and the rows with its answers. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.queue.streams import TEACHER_LOGPROBS
from megarl.queue.trajectory import Trajectory


@dataclass(frozen=True)
class ScoreRequest:
    """The tokens of a sample; those from position `start` (at least 1) on get a score."""

    token_ids: list[int]
    start: int


Scored = list[float]
"""The log-prob of each scored token under the teacher at temperature 1, given all tokens before it."""


def is_scored(row: Trajectory) -> bool:
    """Return whether a teacher scores a row: it can be trained on, and the policy sampled it."""
    return row.status == "ok" and not row.demonstrated


def score_requests(rows: Sequence[Trajectory]) -> list[ScoreRequest]:
    """Return the requests for the rows to score, in their order."""
    return [ScoreRequest([*row.prompt_ids, *row.response_ids], len(row.prompt_ids)) for row in rows if is_scored(row)]


def with_scores(rows: Sequence[Trajectory], scores: Sequence[Scored], teacher: str) -> list[Trajectory]:
    """Return the rows with the teacher's log-probs as their stream `teacher_logprobs`.

    A sample fails if one of its log-probs is not finite. Raises ValueError for a wrong number of values.
    """
    scored = [row for row in rows if is_scored(row)]
    if len(scored) != len(scores):
        raise ValueError(f"teacher {teacher} answered {len(scores)} of {len(scored)} requests")
    found: dict[tuple[int, int], Trajectory] = {}
    for row, answer in zip(scored, scores, strict=True):
        if len(answer) != len(row.response_ids):
            raise ValueError(
                f"sample {row.key}: teacher {teacher} gave {len(answer)} log-probs for "
                f"{len(row.response_ids)} response tokens"
            )
        found[row.sample_index, row.part] = replace(row, streams={**row.streams, TEACHER_LOGPROBS: answer})
    # A sample fails as a whole: all its parts have one status.
    failures = {
        index: f"teacher {teacher}: log-prob {bad} of a response token"
        for (index, _), row in found.items()
        for bad in row.streams[TEACHER_LOGPROBS]
        if not math.isfinite(bad)
    }
    return [
        replace(row, status="failed", failure=failures[row.sample_index])
        if row.sample_index in failures
        else found.get((row.sample_index, row.part), row)
        for row in rows
    ]
