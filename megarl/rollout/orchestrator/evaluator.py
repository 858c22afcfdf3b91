"""The evaluations of a run: one that the trainer waits for, or one that goes on while it trains.

The latter gives way to training: its requests have a lower priority in the engines and wait behind those of training,
and it has only a share of each engine at once. Its report says of which versions the tokens were.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.common.errors import RolloutError
from megarl.common.rundir.notices import write_notice
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.rollout.agents.loop_host import LoopHost
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.orchestrator.evaluation import Share, evaluate_on_fleet, record_lines
from megarl.rollout.orchestrator.ready_batches import PublicationNeeded
from megarl.rollout.tasks.prompts import EvalSet, PromptSource
from megarl.rollout.transport.background import BackgroundTasks
from megarl.rollout.workers.worker_pool import WorkerPool

# The part of an engine's places (`rollout.max_num_seqs`) that an evaluation beside training has at once. An engine
# takes no place away from a running request, so without a limit training would wait for the end of long responses.
SHARE = 4
PRIORITY = 1  # of its requests; those of training have 0, which comes first


@dataclass(frozen=True)
class FinishedEvaluation:
    """An evaluation that went on beside training: one report per set, in the order of the config.

    `version`: that of the weights with which it began. None: as the trainer knows it.
    """

    label: str
    reports: list[SetReport]
    version: int | None = None


class Evaluator:
    """Evaluates every configured set, greedy and sampled; writes the responses to RUN_DIR/eval_{label}.jsonl.

    A disk that does not take these ends nothing: the user is warned, and the reports stay.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        source: PromptSource,
        fleet: EnginePool,
        tasks: BackgroundTasks,
        host: LoopHost,
        workers: WorkerPool | None = None,
    ) -> None:
        """`tasks`: those of the controller; the failure of an evaluation beside training ends the run.

        `workers`: those that run the loops; None: `host` does.
        """
        self._host, self._workers = host, workers
        self._config, self._run_dir, self._tasks = config, run_dir, tasks
        self._source, self._fleet = source, fleet
        self._running: str | None = None
        self._finished: list[FinishedEvaluation] = []

    async def run(self, version: int, label: str) -> list[SetReport]:
        """Evaluate the weights of `version`, which all replicas serve; without a label, write no file."""
        return await self._evaluate(version, label, None)

    def start(self, version: int, label: str) -> None:
        """Begin to evaluate beside training; `take` gives the reports. All replicas serve `version` now.

        Raises ValueError if another one is running.
        """
        if self._running is not None:
            raise ValueError(f"evaluation {label!r} cannot start while {self._running!r} is running")
        at_once = max(len(self._fleet.serving) * self._config.rollout.max_num_seqs // SHARE, 1)
        self._running = label
        self._tasks.start(self._in_background(version, label, Share(asyncio.Semaphore(at_once), PRIORITY)))

    async def take(
        self, wait_s: float, needs_publication: Callable[[], str] = lambda: ""
    ) -> list[FinishedEvaluation] | PublicationNeeded:
        """Return what has finished since the last call; with `wait_s`, first wait for the one that is running.

        If `needs_publication` gives a reason meanwhile, return that instead; the evaluation goes on after the
        publication. Raises RolloutError if it does not end within `wait_s`, or has failed.
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
                    f"beside training; replicas alive: {self._fleet.serving}"
                ) from None

    def drop(self) -> None:
        """Forget everything, because all tasks were cancelled, some perhaps before they began."""
        self._running = None
        self._finished.clear()

    async def _in_background(self, version: int, label: str, share: Share) -> None:
        try:
            reports = await self._evaluate(version, label, share)
        finally:
            self._running = None
        self._finished.append(FinishedEvaluation(label, reports, version))

    async def _evaluate(self, version: int, label: str, share: Share | None) -> list[SetReport]:
        eval_sets = await asyncio.to_thread(self._source.eval_sets)
        reports = [await self._evaluate_set(each, version, label, share) for each in eval_sets]
        if label and eval_sets:
            await asyncio.to_thread(self._write, self._run_dir / f"eval_{label}.jsonl", eval_sets)
        return reports

    def _write(self, path: Path, eval_sets: Sequence[EvalSet]) -> None:
        """Write the file of the responses as a whole; tell the user if that fails."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:  # data may have what UTF-8 cannot represent
                file.writelines(line.encode("utf-8", "replace") + b"\n" for line in record_lines(eval_sets))
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            write_notice(self._run_dir, f"{path} could not be written ({error}); its evaluation is in the metrics")

    def _evaluate_set(self, eval_set: EvalSet, version: int, label: str, share: Share | None) -> Awaitable[SetReport]:
        return evaluate_on_fleet(
            eval_set,
            self._fleet,
            self._host,
            self._workers,
            version=version,
            tag=f"v{version}{label}",
            in_turn=self._config.run.deterministic,
            share=share,
        )
