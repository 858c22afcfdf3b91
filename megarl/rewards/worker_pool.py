"""Rewards in killable processes: a hang, an exception or a crash costs one sample its reward, nothing else.

Each process is owned by a thread of this process, which hands it samples, waits for each answer with a
deadline and replaces it when it is lost. Threads, because `prctl(PR_SET_PDEATHSIG)` follows the thread that
started a process, and because the event loop may run in any thread (Ray's async actors). No signal handlers
are involved.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.rewards.process import RewardProcess, StartError, WorkerDiedError, WorkerTimeoutError
from megarl.rewards.resolve import import_path
from megarl.rewards.types import (
    ERROR_REASONS,
    Answer,
    ErrorReason,
    RewardInput,
    RewardOutcome,
    RewardResult,
)

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02  # work per round trip: cheap samples share one, slow ones do not wait for each other
MAX_BATCH = 64
START_ATTEMPTS = 3  # of a replacement; the first start of a pool is not tried again
IDLE_WAIT_S = 60.0
JOIN_S = 15.0


class RewardPoolError(RuntimeError):
    """The pool as a whole cannot judge: it was closed, or its processes do not start."""


class _Task:
    __slots__ = ("future", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.future: Future[RewardOutcome] = Future()

    def claim(self) -> bool:
        """False if the caller gave it up; a task handed back by a lost process is claimed already."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class RewardPool:
    """`workers` processes that run `function` (`gsm8k`, `math`, `package.module:function`) with `kwargs`.

    `timeout_s` bounds each sample's own time, without waiting and process start; `start_timeout_s` bounds a
    process's start, imports and warm-up included. `on_error` is the score of a sample whose function hung,
    raised, crashed or returned no finite number. Processes start at `start()`, all at once, or at the first
    `score()`.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        kwargs: dict[str, Any] | None = None,
        workers: int = 1,
        timeout_s: float = 10.0,
        on_error: float = 0.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"reward: workers >= 1 and timeout_s > 0 needed, not {workers} and {timeout_s}")
        self.function = import_path(function)
        self.kwargs = dict(kwargs or {})
        try:
            pickle.dumps(self.kwargs)
        except Exception as error:
            raise ValueError(f"reward.kwargs cannot be sent to another process: {error}") from error
        self.workers = workers
        self.timeout_s = timeout_s
        self.on_error = on_error
        self.start_timeout_s = start_timeout_s
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._processes: dict[int, RewardProcess] = {}
        self._failure: str | None = None
        self._sample_seconds = BATCH_SECONDS  # running estimate
        self._counts: Counter[str] = Counter()

    async def start(self) -> None:
        """Start all processes and wait until each has imported and warmed up the function.

        Raises ValueError with the cause if the function cannot be found, adapted or warmed up,
        RewardPoolError if a process dies or is not ready within `start_timeout_s`, or if the pool is
        closed.
        """
        self._launch()
        for future in list(self._started):
            await asyncio.wrap_future(future)
        if self._failure is not None:
            raise RewardPoolError(self._failure)

    async def score(self, sample: RewardInput) -> RewardOutcome:
        """Judge one sample. Nothing the function does raises here; RewardPoolError if the pool is unusable."""
        return await asyncio.wrap_future(self.submit(sample))

    async def score_many(self, samples: Sequence[RewardInput]) -> list[RewardOutcome]:
        """Judge samples concurrently, results in order."""
        return list(await asyncio.gather(*(self.score(sample) for sample in samples)))

    def submit(self, sample: RewardInput) -> Future[RewardOutcome]:
        """`score` for callers without an event loop. A sample that cannot be pickled raises here."""
        self._launch()
        task = _Task(pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))
        with self._changed:
            failure = self._failure
            if failure is None:
                self._tasks.append(task)
                self._changed.notify()
        if failure is not None:
            task.future.set_exception(RewardPoolError(failure))
        return task.future

    def counters(self) -> dict[str, int]:
        """Since the start: `scored`, `errors`, each reason (timeout, exception, crash, invalid), `restarts`."""
        with self._changed:
            reasons = {str(reason): self._counts[reason] for reason in ERROR_REASONS}
            totals = {"scored": self._counts["scored"], "errors": sum(reasons.values())}
            return totals | reasons | {"restarts": self._counts["restarts"]}

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        with self._changed:
            return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """Kill the processes and fail what still waits. Can be called again; a closed pool stays closed."""
        self._fail("the reward pool is closed")
        with self._changed:
            processes, threads = list(self._processes.values()), list(self._threads)
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join(timeout=JOIN_S)
            if thread.is_alive():
                log.error("%s did not end within %g s of the pool being closed", thread.name, JOIN_S)

    def _launch(self) -> None:
        with self._changed:
            if self._threads or self._failure is not None:
                return
            for index in range(self.workers):
                name = f"megarl-reward-{index}"
                self._started.append(Future())
                self._threads.append(threading.Thread(target=self._own, args=(index,), name=name, daemon=True))
            for thread in self._threads:
                thread.start()

    def _own(self, index: int) -> None:
        """A thread's life: keep one process, feed it."""
        try:
            process: RewardProcess | None = self._start_process(index)
        except Exception as error:
            self._fail(str(error))
            is_users = isinstance(error, ValueError)
            self._started[index].set_exception(error if is_users else RewardPoolError(str(error)))
            return
        self._started[index].set_result(None)
        while process is not None and (batch := self._take()):
            lives, unanswered = self._run(process, batch)
            if not lives:
                process.close()
                self._hand_back(unanswered)
                process = self._replace(index)
        if process is not None:
            process.close()

    def _take(self) -> list[_Task]:
        """The next samples for one process, blocking; empty when the pool is closed."""
        with self._changed:
            while self._failure is None:
                cheap = int(BATCH_SECONDS / max(self._sample_seconds, 1e-6))
                fair = -(-len(self._tasks) // self.workers)
                size = max(1, min(cheap, fair, MAX_BATCH))
                batch: list[_Task] = []
                while self._tasks and len(batch) < size:
                    task = self._tasks.popleft()
                    if task.claim():
                        batch.append(task)
                if batch:
                    return batch
                self._changed.wait(IDLE_WAIT_S)
        return []

    def _run(self, process: RewardProcess, batch: list[_Task]) -> tuple[bool, list[_Task]]:
        """Judge a batch: (whether the process lives, tasks without an answer)."""
        try:
            process.send([task.payload for task in batch])
        except WorkerDiedError:
            return False, batch  # it died idle, by no sample's fault
        for position, task in enumerate(batch):
            answer, lives = self._await_answer(process)
            self._finish(task, *answer)
            if not lives:
                return False, batch[position + 1 :]
        return True, []

    def _await_answer(self, process: RewardProcess) -> tuple[Answer, bool]:
        begin = time.monotonic()
        answer: Answer
        lives = False
        try:
            answer, lives = process.receive(self.timeout_s), True
        except WorkerTimeoutError as error:
            answer = (None, "timeout", str(error))
        except WorkerDiedError as error:
            answer = (None, "crash", str(error))
        self._sample_seconds += 0.2 * (time.monotonic() - begin - self._sample_seconds)
        return answer, lives

    def _finish(self, task: _Task, result: RewardResult | None, reason: ErrorReason | None, message: str) -> None:
        with self._changed:
            failure = self._failure
            if failure is None:
                self._counts["scored"] += 1
            if failure is None and reason is not None:
                self._counts[reason] += 1
            count = self._counts[reason] if reason is not None else 0
        if result is not None:
            task.future.set_result(RewardOutcome(result.score, result.components, answer=result.answer))
        elif failure is not None:  # killed by close(), not by the sample
            task.future.set_exception(RewardPoolError(failure))
        else:
            if count & (count - 1) == 0:  # 1st, 2nd, 4th, 8th ...: a broken function must not flood the log
                log.warning("reward %s no. %d: %s", reason, count, message)
            task.future.set_result(RewardOutcome(self.on_error, error=f"{reason}: {message}", reason=reason))

    def _hand_back(self, tasks: list[_Task]) -> None:
        """Unanswered tasks go to the front of the line, or fail with the pool."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._tasks.extendleft(reversed(tasks))
                self._changed.notify_all()
        if failure is not None:
            _refuse(tasks, failure)

    def _start_process(self, index: int) -> RewardProcess:
        process = RewardProcess(self.function, self.kwargs, self.start_timeout_s)
        with self._changed:
            self._processes[index] = process
            failure = self._failure
        try:
            if failure is not None:  # close() did not see this process
                raise RewardPoolError(failure)
            process.wait_ready()
        except BaseException:
            process.close()
            raise
        return process

    def _replace(self, index: int) -> RewardProcess | None:
        """A new process for a lost one; None if the pool is closed, or fails because none can be started."""
        cause: Exception | None = None
        for attempt in range(START_ATTEMPTS):
            if self._failure is not None:
                return None
            try:
                process = self._start_process(index)
            except (ValueError, StartError, RewardPoolError, OSError) as error:
                cause = error
                log.warning("reward process %d, start %d of %d: %s", index, attempt + 1, START_ATTEMPTS, error)
                continue
            with self._changed:
                self._counts["restarts"] += 1
            return process
        self._fail(f"a lost reward process could not be replaced in {START_ATTEMPTS} attempts: {cause}")
        return None

    def _fail(self, message: str) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = message
            waiting, self._tasks = list(self._tasks), deque()
            self._changed.notify_all()
        _refuse(waiting, message)


def _refuse(tasks: Iterable[_Task], message: str) -> None:
    for task in tasks:
        if task.claim():
            task.future.set_exception(RewardPoolError(message))
