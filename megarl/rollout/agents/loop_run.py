"""The jobs of a loop host, one attempt at a job, and the prompt groups that run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace

from megarl.common.errors import RolloutError
from megarl.common.values import changed
from megarl.config.schema import Config
from megarl.evaluation.harness import Mode
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.engine.continuation import Generate, GroupDeadline, RequestContext
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, request_seed, shared
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import GroupProgress, RequestPlace, UnfinishedGroup
from megarl.rollout.tasks.prompts import EvalSet, PromptSource, PromptTask

EVAL_SEED_OFFSET = 1 << 32  # added to group numbers, so that no training sample has the same seed


@dataclass(frozen=True)
class EvalPlace:
    """The place of a response in an evaluation; `tag` makes its request ids unique. `priority`: of its requests."""

    index: int
    mode: Mode
    sample: int
    tag: str
    priority: int = 0


@dataclass(frozen=True)
class LoopJob:
    """The loops of a prompt group, or the loop of one evaluation response (`evaluated`). Workers get it unchanged.

    `group`: the group's id, or a number in its place in an evaluation. `seed`, `group` and the sample give the seeds of
    requests. Request ids begin with `name`. `home`: see `RequestContext`.
    """

    group: int
    prompt: PromptTask
    samples: range
    seed: int
    name: str
    home: int | None = None
    evaluated: EvalPlace | None = None

    @classmethod
    def of_response(cls, eval_set: EvalSet, problem: PromptTask, place: EvalPlace) -> LoopJob:
        """Return the job of one response to a problem of a held-out set."""
        name = f"eval-{eval_set.name}-{place.tag}-{place.index}-{place.mode}"
        prompt = replace(problem, sampling=eval_set.greedy) if place.mode == "greedy" else problem
        samples = range(place.sample, place.sample + 1)
        return cls(EVAL_SEED_OFFSET + place.index, prompt, samples, eval_set.seed, name, evaluated=place)

    def __str__(self) -> str:
        """Return its name in messages."""
        if (place := self.evaluated) is None:
            return f"group {self.group}"
        return f"the {place.mode} response {place.sample} to problem {place.index} of {self.prompt.dataset}"

    def seed_of(self, sample: int, turn: int) -> int | None:
        """Return the seed of a request; None for a greedy response."""
        if self.evaluated is not None and self.evaluated.mode == "greedy":
            return None
        return request_seed(self.seed, self.group, sample, turn)

    def request_context(
        self, place: RequestPlace, near: int | None, deadline: GroupDeadline | None,
        tokens: MutableMapping[str, ResponsePart],
    ) -> RequestContext:  # fmt: skip
        """Return the context of a request. From turn 1 on, the replica `near` has its beginning in its cache."""
        sample, turn = place
        if (own := self.evaluated) is not None:  # first turns share calls, so they keep no tokens of one response
            return RequestContext((own.index, own.mode, sample), near=near) if turn else RequestContext()
        prefix, near = ((self.group, sample), near) if turn else (self.group, None)
        return RequestContext(prefix, self.home, near, deadline, tokens)


class LoopRun:
    """One attempt at a job: its state, its measurements, and its access to the engines and the disk."""

    def __init__(
        self,
        job: LoopJob,
        generate: Generate | None,
        *,
        kept: UnfinishedGroup | None = None,
        deadline: GroupDeadline | None = None,
        persist: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`generate`: sends to the engines; None: a subclass does. `kept`: what an earlier attempt left.

        `persist`: see `RunningGroups`; None: nothing resumes.
        """
        self.job, self.deadline = job, deadline
        self.progress = GroupProgress(job.prompt, kept)
        self.stats = BatchStats()
        self._generate, self._persist = generate, persist
        self._files: asyncio.Future[dict[str, bytes | Awaitable[bytes]]] | None = None

    async def generate(self, request: GenerateRequest, place: RequestPlace, near: int | None) -> GenerateResult:
        """Have an engine answer a request. `near`: the replica of the sample's previous turn."""
        assert self._generate is not None
        if request.images:
            if self._files is None:  # once for all requests of the job; each engine fetches them once
                self._files = asyncio.ensure_future(asyncio.to_thread(_shared_files, self.job.prompt))
            files = await asyncio.shield(self._files)
            for image, shown in zip(request.images, request.files, strict=False):  # what tools have answered with
                if image.hash not in files and isinstance(shown, bytes) and shown:
                    files[image.hash] = shared(shown)
            request = changed(request, files=tuple(files[image.hash] for image in request.images))
        context = self.job.request_context(place, near, self.deadline, self.progress.tokens)
        return await self._generate(request, context)

    async def persist(self) -> None:
        """Return when the job's progress outlives this process. Raises RolloutError if it cannot be written."""
        if self._persist is not None:
            await self._persist(self.job.group)


def _shared_files(prompt: PromptTask) -> dict[str, bytes | Awaitable[bytes]]:
    """Return the `shared` files of a prompt's images by hash. Raises RolloutError for an unreadable file."""
    try:
        files = prompt.files()
    except (OSError, ValueError) as error:
        raise RolloutError(f"an image of {prompt.prompt.name} cannot be read: {error}") from error
    return {name: shared(content) for name, content in files.items()}


Persist = Callable[[int, Mapping[int, GroupProgress]], Awaitable[None]]


class RunningGroups:
    """Runs prompt groups. `progress`: of each running group; `stats`: of those that ended since the last batch."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        generate: Generate,
        partition: str,
        *,
        persist: Persist | None = None,
        in_workers: bool = False,
    ) -> None:
        """`partition` makes the request ids of this attempt of the run unique. `in_workers`: the loops run elsewhere.

        `persist`: returns when a resumed run would find the group's progress; None: nothing resumes.
        """
        self._config, self._source, self._generate, self._partition = config, source, generate, partition
        self._persist, self._in_workers = persist, in_workers
        self._drawing = asyncio.Lock()
        self.progress: dict[int, GroupProgress] = {}
        self.stats = BatchStats()

    async def run(
        self, group_id: int, kept: UnfinishedGroup | None, run_loops: Callable[[LoopRun], Awaitable[list[Trajectory]]]
    ) -> list[Trajectory]:
        """Return the group's trajectories by sample and part; `kept`: what an earlier attempt left.

        Raises what `run_loops` raises, after recording the lengths of the failed group.
        """
        if self._in_workers:  # many groups may begin at once: let other tasks run between two prompts
            async with self._drawing:
                prompt = self._source.draw(group_id)
                await asyncio.sleep(0)
        else:
            prompt = self._source.draw(group_id)
        config = self._config
        job = LoopJob(
            group_id, prompt, range(config.batch.samples_per_group), config.run.seed, f"{self._partition}-{group_id}",
            home=group_id if config.run.deterministic else None,
        )  # fmt: skip
        deadline = GroupDeadline.of(config, time.monotonic())
        run = LoopRun(job, self._generate, kept=kept, deadline=deadline, persist=self.persist)
        self.progress[group_id] = run.progress
        try:
            return await run_loops(run)
        except Exception:
            self.stats.failed_lengths += run.progress.lengths()
            raise
        finally:
            del self.progress[group_id]
            self.stats.add(run.stats)

    async def persist(self, group_id: int) -> None:
        """Return when the group's progress is kept. Raises RolloutError if it cannot be written."""
        if self._persist is not None:
            await self._persist(group_id, self.progress)

    def take_stats(self) -> BatchStats:
        """Return the measurements and start over."""
        stats, self.stats = self.stats, BatchStats()
        return stats
