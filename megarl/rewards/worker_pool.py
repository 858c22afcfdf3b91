"""Runs reward functions in processes that can be killed: a hang, an exception or a crash affects only one sample.

Each process is owned by one thread of this process. The thread sends it samples, waits for each answer with a timeout
and replaces the process when it ends. Threads are used because PR_SET_PDEATHSIG is tied to the thread that started a
process, and because the event loop may run in any thread (Ray's async actors). No signal handlers are involved.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from megarl.common.thread_results import ThreadResults
from megarl.rewards.process import RewardProcess, StartError, WorkerDiedError, WorkerTimeoutError
from megarl.rewards.resolve import import_path
from megarl.rewards.types import ErrorReason, RewardInput, RewardOutcome, RewardResult, RewardSpec, WorkerMessage

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02  # target work per message: fast samples share one, slow samples are spread over the processes
MAX_BATCH = 64
START_ATTEMPTS = 3  # for a replacement; the first start of a pool is not repeated
IDLE_WAIT_S = 60.0
JOIN_S = 15.0


class RewardPoolError(RuntimeError):
    """The pool cannot score any sample: it was closed, or its processes do not start."""


class _Task:
    """A pickled sample and the future of its outcome."""

    __slots__ = ("future", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.future: Future[RewardOutcome] = Future()

    def claim(self) -> bool:
        """Mark the task as running; return False if the caller has cancelled it. May be repeated."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class RewardPool:
    """A pool of `workers` processes, each of which runs any of `functions` (at least one).

    `timeout_s` limits the time of each sample, without waiting and process start; `start_timeout_s` limits the start of
    a process, imports and warm-up included. `on_error` is the score of a sample whose function hung, raised, crashed or
    returned no finite number. All processes start at the same time, by `start()` or by the first sample. Raises
    ValueError if another process could not import a function or receive its arguments.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        *,
        workers: int,
        timeout_s: float,
        on_error: float,
        start_timeout_s: float,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"a reward pool needs workers >= 1 and timeout_s > 0, not reward.workers={workers} and "
                f"reward.timeout_s={timeout_s}"
            )
        self.functions = tuple(replace(each, function=import_path(each.function)) for each in functions)
        for each in self.functions:
            try:
                pickle.dumps(each.kwargs)
            except Exception as error:
                raise ValueError(f"{each.key}.kwargs cannot be sent to another process: {error}") from error
        self.workers = workers
        self.timeout_s = timeout_s
        self.on_error = on_error
        self.start_timeout_s = start_timeout_s
        self._results = ThreadResults()
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._processes: dict[int, RewardProcess] = {}
        self._failure: str | None = None
        self._sample_seconds = BATCH_SECONDS  # running estimate
        self._errors: Counter[ErrorReason] = Counter()

    async def start(self) -> None:
        """Start all processes and wait until each has imported and warmed up the functions.

        Raises ValueError with the cause if one of them cannot be found, adapted or warmed up. Raises RewardPoolError
        if a process ends or is not ready within `start_timeout_s`, or if the pool is closed.
        """
        self._launch()
        for future in list(self._started):
            await asyncio.wrap_future(future)
        if self._failure is not None:
            raise RewardPoolError(self._failure)

    async def score(self, sample: RewardInput, function: int = 0) -> RewardOutcome:
        """Score one sample by the function of that number.

        Failures of the function are part of the outcome; RewardPoolError if the pool failed.
        """
        return await self._results.of(self.submit(sample, function))

    def submit(self, sample: RewardInput, function: int = 0) -> Future[RewardOutcome]:
        """Score one sample without an event loop. A sample that cannot be pickled raises at once."""
        self._launch()
        task = _Task(pickle.dumps((function, sample), protocol=pickle.HIGHEST_PROTOCOL))
        with self._changed:
            failure = self._failure
            if failure is None:
                self._tasks.append(task)
                self._changed.notify()
        if failure is not None:
            task.future.set_exception(RewardPoolError(failure))
        return task.future

    def close(self) -> None:
        """Kill the processes and fail the waiting samples. May be called again; a closed pool stays closed."""
        self._fail("the reward pool is closed")
        with self._changed:
            processes, threads = list(self._processes.values()), list(self._threads)
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join(timeout=JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %g s after the pool was closed", thread.name, JOIN_S)

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
        """Run one thread: start a process, send it samples and replace it until the pool is closed."""
        try:
            process: RewardProcess | None = self._start_process(index)
        except Exception as error:
            self._fail(str(error))
            wrong_function = isinstance(error, ValueError)
            self._started[index].set_exception(error if wrong_function else RewardPoolError(str(error)))
            return
        self._started[index].set_result(None)
        while process is not None and (batch := self._take()):
            alive, unanswered = self._run(process, batch)
            if not alive:
                process.close()
                self._hand_back(unanswered)
                process = self._replace(index)
        if process is not None:
            process.close()

    def _take(self) -> list[_Task]:
        """Wait for the next samples for one process and return them; empty if the pool is closed."""
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
        """Score a batch; return (whether the process still runs, the tasks without an answer)."""
        try:
            process.send([task.payload for task in batch])
        except WorkerDiedError:
            return False, batch  # it ended while it was idle, so no sample is the cause
        for position, task in enumerate(batch):
            answer, alive = self._await_answer(process)
            self._finish(task, *answer)
            if not alive:
                return False, batch[position + 1 :]
        return True, []

    def _await_answer(self, process: RewardProcess) -> tuple[WorkerMessage, bool]:
        """Wait for one answer; return it, and whether the process is still usable."""
        begin = time.monotonic()
        answer: WorkerMessage
        alive = False
        try:
            answer, alive = process.receive(self.timeout_s), True
        except WorkerTimeoutError as error:
            answer = (None, "timeout", str(error))
        except WorkerDiedError as error:
            answer = (None, "crash", str(error))
        self._sample_seconds += 0.2 * (time.monotonic() - begin - self._sample_seconds)
        return answer, alive

    def _finish(self, task: _Task, result: RewardResult | None, reason: ErrorReason | None, message: str) -> None:
        """Complete the task of an answer, and log some of the errors."""
        with self._changed:
            failure = self._failure
            if failure is None and reason is not None:
                self._errors[reason] += 1
            count = self._errors[reason] if reason is not None else 0
        if result is not None:
            task.future.set_result(RewardOutcome(result.score, result.components, answer=result.answer))
        elif failure is not None:  # close() killed the process, so the sample did not fail
            task.future.set_exception(RewardPoolError(failure))
        else:
            if count & (count - 1) == 0:  # only the 1st, 2nd, 4th, 8th ... error is logged
                log.warning("reward %s no. %d: %s", reason, count, message)
            task.future.set_result(RewardOutcome(self.on_error, error=f"{reason}: {message}", reason=reason))

    def _hand_back(self, tasks: list[_Task]) -> None:
        """Put unanswered tasks at the front of the queue, or fail them if the pool has failed."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._tasks.extendleft(reversed(tasks))
                self._changed.notify_all()
        if failure is not None:
            _refuse(tasks, failure)

    def _start_process(self, index: int) -> RewardProcess:
        """Start a process and wait until it is ready; raises the same errors as `start`, and StartError."""
        process = RewardProcess(self.functions, self.start_timeout_s)
        with self._changed:
            self._processes[index] = process
            failure = self._failure
        try:
            if failure is not None:  # close() ran before this process was recorded and has not killed it
                raise RewardPoolError(failure)
            process.wait_ready()
        except BaseException:
            process.close()
            raise
        return process

    def _replace(self, index: int) -> RewardProcess | None:
        """Start a replacement for a process that ended.

        Returns None if the pool is closed, and also if no process can be started, which fails the pool.
        """
        cause: Exception | None = None
        for attempt in range(START_ATTEMPTS):
            if self._failure is not None:
                return None
            try:
                return self._start_process(index)
            except (ValueError, StartError, RewardPoolError, OSError) as error:
                cause = error
                log.warning("reward process %d, start %d of %d: %s", index, attempt + 1, START_ATTEMPTS, error)
        self._fail(f"a reward process that ended could not be replaced in {START_ATTEMPTS} attempts: {cause}")
        return None

    def _fail(self, message: str) -> None:
        """Mark the pool as failed (the first message is kept) and fail all waiting tasks."""
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
