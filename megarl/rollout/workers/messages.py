"""Messages between the controller and an agent worker about the worker's loops. Pure.

Each message names a run: one attempt of one worker at a job. Run numbers are never reused, so a message from a run that
is over, another worker or an abandoned history has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.common.errors import NoReplicaLeft, RequestFailed, RolloutError, ToolFailed
from megarl.queue.trajectory import Trajectory
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.agents.loop_host import EvaluatedResponse
from megarl.rollout.agents.loop_run import LoopJob
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.resume.group_progress import FrozenLoop, RequestPlace, UnfinishedGroup

START = 800  # size of the start of one loop, which is much work
PLAIN = 64  # size of a message without tokens; a token and a log-prob each have size 1


@dataclass(frozen=True)
class SentFailure:
    """An exception sent to another process: the name of its type, its text, and its replica."""

    kind: str
    text: str
    replica: int = -1

    @classmethod
    def of(cls, error: BaseException) -> SentFailure:
        """Return an exception's content."""
        return cls(type(error).__name__, str(error), getattr(error, "replica", -1))

    def exception(self) -> Exception:
        """Return an exception of the same type, or a new type of that name if only the other process has it."""
        if self.kind == NoReplicaLeft.__name__:
            return NoReplicaLeft(self.replica, self.text)
        if self.kind in _KNOWN:
            return _KNOWN[self.kind](self.text)
        named: type[Exception] = type(self.kind, (Exception,), {})
        return named(self.text)


_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RolloutError, RequestFailed, RewardPoolError, ToolFailed, TimeoutError, ValueError)
}


@dataclass(frozen=True)
class Start:
    """To the worker: run the loops of a job. `kept`: their progress in an earlier worker or attempt.

    `deadline`: the group's, as `GroupDeadline.sent`; it counts from the group's first start.
    """

    run: int
    job: LoopJob
    kept: UnfinishedGroup
    deadline: GroupDeadline | None = None

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        tokens = sum(2 * len(each.tokens.response_ids) for each in self.kept.responses.values())
        return START * len(self.job.samples) + len(self.job.prompt.ids) + tokens


@dataclass(frozen=True)
class LoopAnswer:
    """To the worker: the response to the request at a place, or the end of a `Persist` by number; or a failure."""

    run: int
    key: RequestPlace | int
    result: GenerateResult | None
    failure: SentFailure | None = None

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + (2 * len(self.result.response_ids) if self.result is not None else 0)


@dataclass(frozen=True)
class Drop:
    """To the worker: end a run's loops, and forget it."""

    run: int
    size = PLAIN


@dataclass(frozen=True)
class LoopRequest:
    """To the controller: a loop's request. `near`: the replica with its beginning in the cache.

    `prompt`: the digest of its prompt (`prompt_digest`).
    """

    run: int
    place: RequestPlace
    request: GenerateRequest
    near: int | None
    prompt: str

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + len(self.request.prompt_ids)


@dataclass(frozen=True)
class Frozen:
    """To the controller: the records of a loop."""

    run: int
    sample: int
    loop: FrozenLoop

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + (len(self.loop.state) + sum(len(call.text or "") for call in self.loop.calls.values())) // 4


@dataclass(frozen=True)
class Persist:
    """To the controller: send `LoopAnswer` once the run's records so far outlive the worker (a group's: on disk)."""

    run: int
    number: int
    size = PLAIN


@dataclass(frozen=True)
class LoopEnd:
    """To the controller: all loops of the run have ended. `result`: what `LoopHost` returned or raised for its job.

    `stats`: measurements of the samples.
    """

    run: int
    result: list[Trajectory] | EvaluatedResponse | SentFailure
    stats: BatchStats

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        if isinstance(self.result, EvaluatedResponse):
            return PLAIN + self.result.scored.tokens
        if isinstance(self.result, SentFailure):
            return PLAIN
        return sum(PLAIN + len(row.prompt_ids) + 3 * len(row.response_ids) for row in self.result)


ToWorker = Start | LoopAnswer | Drop
ToController = LoopRequest | Frozen | Persist | LoopEnd
