"""Messages between the controller and an agent worker about the loops that the worker runs. Pure.

Each message names a run: one attempt of one worker at one group, or at one response of an evaluation. The numbers of
runs are never used twice, so a message of a run that is over, of another worker or of a history that the trainer has
left changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.common.errors import NoReplicaLeft, RequestFailed, RolloutError, ToolFailed
from megarl.queue.trajectory import SampleTag
from megarl.rewards.worker_pool import RewardPoolError
from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.agents.eval_context import EvaluatedResponse
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.resume.group_progress import RequestPlace
from megarl.rollout.tasks.eval_sets import EvalTask
from megarl.rollout.tasks.prompts import PromptTask

START, START_ONE = 12_000, 1_000  # of the start of a group, which is much work: all of its loops begin; of one loop
PLAIN = 64  # the size of a message without tokens, where a token, and a log-prob, has size 1


@dataclass(frozen=True)
class SentFailure:
    """An exception that has crossed a process: the name of its type, its text, and the replica that it names."""

    kind: str
    text: str
    replica: int = -1

    @classmethod
    def of(cls, error: BaseException) -> SentFailure:
        """Return what is sent of an exception."""
        return cls(type(error).__name__, str(error), getattr(error, "replica", -1))

    def exception(self) -> Exception:
        """Return an exception of the same type; of one that only the other process has, one with the same name."""
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
class StartGroup:
    """To the worker: run the loops of a group. `kept`: the record of what an attempt before had (journal_records).

    `left_s`: the seconds until the group's deadline, which counts from its first start; None if it has none.
    """

    run: int
    group: int
    drawn: PromptTask
    kept: bytes | None = None
    left_s: float | None = None

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return START + len(self.drawn.ids) + len(self.kept or b"") // 4


@dataclass(frozen=True)
class StartResponse:
    """To the worker: run the loop of one response of an evaluation. `kept`: as of `StartGroup`."""

    run: int
    task: EvalTask
    kept: bytes | None = None

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return START_ONE + len(self.task.problem.prompt_ids) + len(self.kept or b"") // 4


@dataclass(frozen=True)
class Answered:
    """To the worker: the response to a request, or why there is none."""

    run: int
    place: RequestPlace
    result: GenerateResult | None
    failure: SentFailure | None = None

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + (2 * len(self.result.response_ids) if self.result is not None else 0)


@dataclass(frozen=True)
class Persisted:
    """To the worker: the records that it has sent before `Persist` are on the disk, or why they are not."""

    run: int
    number: int
    failure: SentFailure | None = None
    size = PLAIN


@dataclass(frozen=True)
class GroupVerdict:
    """To the worker: write the rows of a group that has ended to the queue, or forget them.

    `more`: see `QueueWriter.put_group`.
    """

    run: int
    queue: bool
    more: bool = False
    size = PLAIN


@dataclass(frozen=True)
class DropGroup:
    """To the worker: end the loops of a group, or of a response of an evaluation, and forget it."""

    run: int
    size = PLAIN


@dataclass(frozen=True)
class Asked:
    """To the controller: a request of a loop. `near`: the replica that has its beginning in the cache.

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
    """To the controller: the records of a loop (`FrozenLoop`) as JSON, of that version."""

    run: int
    sample: int
    version: int
    text: bytes

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + len(self.text) // 4


@dataclass(frozen=True)
class Persist:
    """To the controller: `Persisted` is to be sent when the records of the run so far outlive the worker.

    Those of a group are on the disk then.
    """

    run: int
    number: int
    size = PLAIN


@dataclass(frozen=True)
class Ended:
    """To the controller: all loops of a group have ended.

    `failures`: of the samples that cannot be used. `record`: the rows, as the journal has them (journal_records).
    `stats`: what was measured of the samples.
    """

    run: int
    tags: tuple[SampleTag, ...]
    failures: tuple[str, ...]
    versions: frozenset[int]
    record: bytes
    stats: BatchStats

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN * len(self.tags) + len(self.record) // 4


@dataclass(frozen=True)
class Responded:
    """To the controller: the loop of a response of an evaluation has ended."""

    run: int
    ended: EvaluatedResponse

    @property
    def size(self) -> int:
        """See `PLAIN`."""
        return PLAIN + self.ended.scored.tokens


@dataclass(frozen=True)
class Failed:
    """To the controller: a loop of the run has failed, and the others were ended."""

    run: int
    failure: SentFailure
    stats: BatchStats
    size = PLAIN


@dataclass(frozen=True)
class Queued:
    """To the controller: the rows of a group are in the queue, or why they are not."""

    run: int
    failure: SentFailure | None = None
    size = PLAIN


ToWorker = StartGroup | StartResponse | Answered | Persisted | GroupVerdict | DropGroup
ToController = Asked | Frozen | Persist | Ended | Responded | Failed | Queued


@dataclass(frozen=True)
class WorkerReport:
    """News of a worker since the last report. `waiting`: what its reward processes work on, the end of a sentence."""

    number: int
    messages: tuple[ToController, ...] = ()
    waiting: str = ""
