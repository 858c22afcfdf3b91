"""The evaluations of a run: the trainer waits for one, or it runs alongside training.

The latter gives way to training: its requests have a lower priority in the engines, wait behind those of training, and
use only a share of each engine. Its report has the versions of the tokens.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.common.errors import LostWithWorkers, RolloutError
from megarl.common.rundir.notices import write_notice
from megarl.evaluation.accuracy import ScoredResponse
from megarl.evaluation.harness import Mode, SetReport, evaluate_set
from megarl.rollout.agents.loop_host import LoopHost
from megarl.rollout.agents.loop_run import EvalPlace, LoopJob, LoopRun
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.fleet.engine_pool import EnginePool, RequestCoalescer
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.rollout.tasks.prompts import EvalSet, PromptSource, PromptTask
from megarl.rollout.transport import background
from megarl.rollout.transport.background import BackgroundTasks, cancel_all
from megarl.rollout.workers.worker_pool import WorkerPool

# An evaluation alongside training uses at most 1/SHARE of an engine's places (`rollout.max_num_seqs`). An engine takes
# no place away from a running request, so without a limit training would wait for long responses.
SHARE = 4
PRIORITY = 1  # of its requests; training has 0, which comes first
CHUNK = 32  # requests in one call of the fleet


async def evaluate_on_fleet(
    eval_set: EvalSet,
    pool: EnginePool,
    host: LoopHost,
    workers: WorkerPool | None = None,
    *,
    version: int,
    tag: str,
    in_turn: bool = False,
    share: asyncio.Semaphore | None = None,
) -> SetReport:
    """Sample greedy and sampled responses to every problem, score them, and fill `eval_set.records`.

    `workers` run the loops; without them `host` does. `tag` makes the request ids unique. `in_turn`: requests go to the
    replicas in turn, not by load. `share`: bounds the concurrent requests of an evaluation alongside training, which
    have a lower priority. Seeds depend only on (seed, problem, sample), so they are the same before and after training.
    """
    coalescer = RequestCoalescer(pool, chunk=CHUNK, in_turn=in_turn, background=share is not None)
    eval_set.records.clear()
    seen: set[int] = set()

    async def generate(request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Bound the requests here, wherever the loops run."""
        if share is None:
            return await coalescer.generate(request, context)
        async with share:
            return await coalescer.generate(request, context)

    async def respond(problem: PromptTask, index: int, mode: Mode, sample: int) -> ScoredResponse:
        place = EvalPlace(index, mode, sample, tag, 0 if share is None else PRIORITY)
        run = LoopRun(LoopJob.of_response(eval_set, problem, place), generate)
        try:
            ended = await (workers or host).respond(run)
        except LostWithWorkers as error:
            ended = await host.failed(run, error)
        seen.update(ended.versions)
        eval_set.records.append(ended.record)
        return ended.scored

    try:
        report = await evaluate_set(
            eval_set.name, eval_set.problems, respond, samples=eval_set.samples, version=version
        )
    finally:
        await coalescer.cancel()
    eval_set.records.sort(key=lambda record: (record["index"], record["mode"], record["sample"]))
    # Engines that read the weights from files do not know a version.
    return replace(report, oldest=min(seen, default=version), newest=max(seen, default=version))


@dataclass(frozen=True)
class FinishedEvaluation:
    """An evaluation that ran alongside training: one report per set, in the order of the config.

    `version`: of the weights at its start; None: as the trainer knows it.
    """

    label: str
    reports: list[SetReport]
    version: int | None = None


class Evaluator:
    """Evaluates every configured set, greedy and sampled; writes the responses to RUN_DIR/eval_{label}.jsonl.

    If these cannot be written, the user is warned, and the reports are kept.
    """

    def __init__(
        self,
        run_dir: Path,
        source: PromptSource,
        fleet: EnginePool,
        tasks: BackgroundTasks,
        host: LoopHost,
        workers: WorkerPool | None = None,
        *,
        max_num_seqs: int,
        deterministic: bool,
    ) -> None:
        """`tasks`: the controller's; a failed evaluation alongside training ends the run.

        `workers` run the loops; without them `host` does. `max_num_seqs`: the places of an engine.
        """
        self._host, self._workers = host, workers
        self._max_num_seqs, self._deterministic = max_num_seqs, deterministic
        self._run_dir, self._tasks = run_dir, tasks
        self._source, self._fleet = source, fleet
        self._running: str | None = None
        self._finished: list[FinishedEvaluation] = []

    async def run_within(
        self, limit_s: float, version: int, label: str, needs_publication: Callable[[], str],
        working: Callable[[], str],
    ) -> list[SetReport] | PublicationNeeded:  # fmt: skip
        """Do `run` for a waiting trainer; give up with PublicationNeeded if `needs_publication` gives a reason.

        Raises RolloutError after `limit_s`, with what rewards and agent workers work on (`working`).
        """
        evaluation = asyncio.ensure_future(self.run(version, label))
        try:
            async with asyncio.timeout(limit_s):
                while not evaluation.done():
                    await asyncio.wait({evaluation}, timeout=background.LOOK_S)
                    if not evaluation.done() and (reason := needs_publication()):
                        return PublicationNeeded(reason)
        except TimeoutError:
            raise RolloutError(
                f"the trainer waited {limit_s:.0f} s (timeouts.generate_s) for an evaluation; replicas alive: "
                f"{self._fleet.serving}{working()}"
            ) from None
        finally:
            await cancel_all([evaluation], "evaluations")
        return evaluation.result()

    def start(self, version: int, label: str) -> None:
        """Start an evaluation alongside training; `take` returns its reports. All replicas must serve `version`.

        Raises ValueError if another one is running.
        """
        if self._running is not None:
            raise ValueError(f"evaluation {label!r} cannot start while {self._running!r} is running")
        at_once = max(len(self._fleet.serving) * self._max_num_seqs // SHARE, 1)
        self._running = label
        self._tasks.start(self._in_background(version, label, asyncio.Semaphore(at_once)))

    async def take(
        self, wait_s: float, needs_publication: Callable[[], str] = lambda: ""
    ) -> list[FinishedEvaluation] | PublicationNeeded:
        """Return what has finished since the last call; with `wait_s`, first wait for the running one.

        Returns PublicationNeeded if `needs_publication` gives a reason during the wait; the evaluation continues after
        the publication. Raises RolloutError if it does not end within `wait_s`, or has failed.
        """
        deadline = time.monotonic() + wait_s
        while True:
            self._tasks.check()
            if self._running is None or not wait_s:
                finished, self._finished = self._finished, []
                return finished
            if reason := needs_publication():
                return PublicationNeeded(reason)
            try:
                await self._tasks.await_change(deadline - time.monotonic())
            except TimeoutError:
                raise RolloutError(
                    f"the trainer waited {wait_s:.0f} s (timeouts.generate_s) for the evaluation {self._running!r} "
                    f"alongside training; replicas alive: {self._fleet.serving}"
                ) from None

    def drop(self) -> None:
        """Forget everything, after all tasks were cancelled, perhaps before they began."""
        self._running = None
        self._finished.clear()

    async def _in_background(self, version: int, label: str, share: asyncio.Semaphore) -> None:
        try:
            reports = await self.run(version, label, share)
        finally:
            self._running = None
        self._finished.append(FinishedEvaluation(label, reports, version))

    async def run(self, version: int, label: str, share: asyncio.Semaphore | None = None) -> list[SetReport]:
        """Evaluate the weights of `version`, which all replicas serve; without a label, write no file."""
        eval_sets = await asyncio.to_thread(self._source.eval_sets)
        reports = [
            await evaluate_on_fleet(
                each, self._fleet, self._host, self._workers, version=version, tag=f"v{version}{label}",
                in_turn=self._deterministic, share=share,
            )
            for each in eval_sets
        ]  # fmt: skip
        if label and eval_sets:
            await asyncio.to_thread(self._write, self._run_dir / f"eval_{label}.jsonl", eval_sets)
        return reports

    def _write(self, path: Path, eval_sets: Sequence[EvalSet]) -> None:
        """Write the file of responses atomically; warn the user on failure."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:  # data may contain what UTF-8 cannot represent
                for each in eval_sets:
                    for record in each.records:
                        line = json.dumps({"set": each.name, **record}, ensure_ascii=False)
                        file.write(line.encode("utf-8", "replace") + b"\n")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            write_notice(self._run_dir, f"{path} could not be written ({error}); its evaluation is in the metrics")
