"""Runs reward functions in processes that can be killed: a hang, an exception or a crash affects only one sample.

One thread of this process owns each process. It sends samples, waits for each answer with a timeout, and replaces the
process when it ends or sends anything but the awaited reward. If a sample's process ended, sent something else or ran
out of memory, the sample is scored a second time, because it may not be the cause. Threads are used because
PR_SET_PDEATHSIG is tied to the thread that started a process, and because the event loop may run in any thread (Ray's
async actors). No signal handlers are involved.
"""

import asyncio
import itertools
import logging
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from megarl.common.errors import RolloutError
from megarl.common.process.child_process import StartError
from megarl.common.values import GIB, counted
from megarl.rewards.process import Failures, RewardProcess
from megarl.rewards.types import ErrorReason, OnError, RewardInput, RewardResult, RewardSpec

log = logging.getLogger(__name__)

BATCH_SECONDS = 0.02  # target work per message: fast samples share one, slow ones are spread over the processes
MAX_BATCH = 64
START_ATTEMPTS = 3  # for a replacement; the first start of a pool is not repeated
RETRY_S = 0.5  # before the second start, and twice that before the third
MAX_REDONE = 1  # how often a sample is scored again
MAX_NOT_TAKEN = 3  # how often a process may end before it takes a sample, which is not the sample's fault
# Failures that other causes may have: another program killed the process, or earlier samples filled its memory.
_REDONE: frozenset[ErrorReason] = frozenset({"crash", "foreign", "memory"})
IDLE_WAIT_S = 60.0
JOIN_S = 15.0


class RewardPoolError(RolloutError):
    """The pool cannot score samples: it is closed, its processes do not start, or a function fails too often."""


class _Task:
    """A pickled sample, and the future of its outcome.

    `redone`: how often it was scored again; `not_taken`: how often a process ended before it took the sample.
    """

    __slots__ = ("function", "future", "not_taken", "number", "payload", "redone")

    def __init__(self, number: int, function: int, payload: bytes) -> None:
        self.number, self.function, self.payload = number, function, payload
        self.redone = self.not_taken = 0
        self.future: Future[RewardResult] = Future()

    def claim(self) -> bool:
        """Mark the task as running; return False if the caller has cancelled it. Idempotent."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


class RewardPool:
    """A pool of `workers` processes, each of which runs any of `functions` (at least one).

    `timeout_s` limits the time of each sample, without waiting and process start; `start_timeout_s` limits the start of
    a process, imports and warm-up included; `memory_gib` what a process may allocate. `on_error` says what happens to a
    sample whose function hung, raised, crashed or returned no finite number. If these are more than `max_error_share`
    of a function's latest samples, and MIN_ERRORS or more, the pool fails with the function's own message. `report` is
    given the messages that a person should see at once. All processes start at the same time, by `start()` or by the
    first sample. Raises ValueError if another process could not receive a function's arguments.
    """

    def __init__(
        self,
        functions: Sequence[RewardSpec],
        *,
        workers: int,
        timeout_s: float,
        on_error: OnError,
        start_timeout_s: float,
        memory_gib: float | None = None,
        max_error_share: float = 1.0,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"a reward pool needs workers >= 1 and timeout_s > 0, not reward.workers={workers} and "
                f"reward.timeout_s={timeout_s}"
            )
        self.functions = tuple(functions)
        for each in self.functions:
            try:
                pickle.dumps(each.kwargs)
            except Exception as error:
                raise ValueError(f"{each.key}.kwargs cannot be sent to another process: {error}") from error
        self.workers = workers
        self.timeout_s = timeout_s
        self.on_error = on_error
        self.start_timeout_s = start_timeout_s
        self.memory_gib = memory_gib
        self.max_error_share = max_error_share
        self._failures = [Failures(_name(each), on_error, max_error_share) for each in self.functions]
        self._report = report
        self._numbers = itertools.count(1)
        self._redone = 0
        self._tasks: deque[_Task] = deque()
        self._running: dict[int, _Task] = {}  # by process: its current sample
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []
        self._processes: dict[int, RewardProcess] = {}
        self._failure: str | None = None
        self._sample_seconds = BATCH_SECONDS  # running estimate

    async def start(self) -> None:
        """Start all processes and wait until each has imported and warmed up the functions.

        Raises ValueError with the cause if a function cannot be found, adapted or warmed up. Raises RewardPoolError if
        a process ends or is not ready within `start_timeout_s`, or if the pool is closed.
        """
        self._launch()
        for future in list(self._started):
            await asyncio.wrap_future(future)
        if self._failure is not None:
            raise RewardPoolError(self._failure)

    async def score(self, sample: RewardInput, function: int = 0) -> RewardResult:
        """Score one sample by the function of that number.

        Failures of the function are part of the outcome. Raises RewardPoolError if the pool failed.
        """
        return await asyncio.wrap_future(self.submit(sample, function))

    def submit(self, sample: RewardInput, function: int = 0) -> Future[RewardResult]:
        """Score one sample without an event loop. A sample that cannot be pickled raises at once."""
        self._launch()
        payload = pickle.dumps((function, sample), protocol=pickle.HIGHEST_PROTOCOL)
        task = _Task(next(self._numbers), function, payload)
        with self._changed:
            failure = self._failure
            if failure is None:
                self._tasks.append(task)
                self._changed.notify()
        if failure is not None:
            task.future.set_exception(RewardPoolError(failure))
        return task.future

    def waiting(self) -> str:
        """Return what the pool works on and how often its functions failed, as the end of a sentence."""
        running = {_name(self.functions[task.function]) for task in list(self._running.values())}
        waiting = len(self._tasks) + len(self._running)
        parts = [f"waiting for the reward of {counted(waiting, 'sample')}"] if waiting else []
        parts += [f"reward function {name} is running" for name in sorted(running)]
        for spec, failures in zip(self.functions, self._failures, strict=True):
            counts = ", ".join(f"{reason} {count} times" for reason, count in sorted(failures.by_reason.items()))
            parts += [f"reward function {_name(spec)} has failed: {counts}"] if counts else []
        return "".join(f"; {part}" for part in parts)

    def close(self) -> None:
        """Kill the processes and fail the waiting samples. Idempotent; a closed pool stays closed."""
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
        batch: list[_Task] = []
        try:
            while process is not None and (batch := self._take()):
                alive, unanswered = self._run(index, process, batch)
                if not alive:
                    process.close()
                    self._hand_back(unanswered)
                    process = self._replace(index)
        except Exception as error:  # no sample may wait for a thread that has ended
            log.exception("the thread of reward process %d failed", index)
            self._fail(f"the thread of reward process {index} failed: {type(error).__name__}: {error}")
            _refuse([task for task in batch if not task.future.done()], str(self._failure))
        if process is not None:
            process.close()

    def _take(self) -> list[_Task]:
        """Wait for the next samples of a process, and return them; empty if the pool is closed."""
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

    def _run(self, index: int, process: RewardProcess, batch: list[_Task]) -> tuple[bool, list[_Task]]:
        """Score a batch; return (whether the process still runs, the tasks without an answer)."""
        payloads = [(task.number, task.payload) for task in batch]
        if ending := process.send(payloads, min(self.timeout_s, self.start_timeout_s)):
            return False, self._not_taken(batch, ending)
        for position, task in enumerate(batch):
            self._running[index] = task
            try:
                answer, alive = self._await_answer(process, task)
            finally:
                del self._running[index]
            again = answer.reason in _REDONE and task.redone < MAX_REDONE
            if again:
                task.redone += 1
                self._redone += 1
                if self._redone & (self._redone - 1) == 0:  # only the 1st, 2nd, 4th, 8th ... is logged
                    log.warning("sample no. %d is scored again: %s: %s", self._redone, answer.reason, answer.error)
            else:
                self._finish(task, answer)
            if not alive:
                return False, batch[position + (not again) :]
        return True, []

    def _not_taken(self, batch: list[_Task], ending: str) -> list[_Task]:
        """Return the tasks to send again; fail those that were not taken too often."""
        again = []
        for task in batch:
            task.not_taken += 1
            if task.not_taken < MAX_NOT_TAKEN:
                again.append(task)
            else:
                message = f"{MAX_NOT_TAKEN} processes ended before they had taken the sample; the latest: {ending}"
                self._finish(task, RewardResult.failed("crash", message))
        return again

    def _await_answer(self, process: RewardProcess, task: _Task) -> tuple[RewardResult, bool]:
        """Wait for one answer; return it, and whether the process is still usable."""
        begin = time.monotonic()
        answer = process.receive(task.number, self.timeout_s)
        # Memory filled by earlier samples stays filled: the next ones would fail too.
        alive = answer.reason in (None, "exception", "invalid")
        if answer.reason == "memory" and self.memory_gib is not None:
            limit = f"; it may have {self.memory_gib:g} GiB (reward.memory_gib)"
            answer = replace(answer, error=f"{answer.error}{limit}")
        self._sample_seconds += 0.2 * (time.monotonic() - begin - self._sample_seconds)
        return answer, alive

    def _finish(self, task: _Task, answer: RewardResult) -> None:
        """Complete the task of an answer, and fail the pool if its function fails too often."""
        spec, failures = self.functions[task.function], self._failures[task.function]
        message, too_many, at_once = "", False, False
        with self._changed:
            failure = self._failure
            if failure is None:
                too_many = failures.note(answer.reason)
                if answer.reason is not None:
                    message, at_once = failures.message(answer)
        if message:  # outside the lock, because it may wait for a file
            (self._report if at_once else log.warning)(message)
        if answer.reason is None:
            task.future.set_result(replace(answer, dropped=False, redone=task.redone))
        elif failure is not None:  # close() killed the process, so the sample did not fail
            task.future.set_exception(RewardPoolError(failure))
        else:
            if too_many:
                self._fail(
                    f"the reward function {_name(spec)} failed for {failures.recent}, and "
                    f"reward.max_error_share is {self.max_error_share:g}; the latest failure: {answer.reason}: "
                    + "\n".join(filter(None, [answer.error, answer.trace]))
                )
            score = 0.0 if self.on_error == "drop" else self.on_error
            error = f"reward function {_name(spec)}: {answer.reason}: {answer.error}"
            dropped, redone = self.on_error == "drop", task.redone
            task.future.set_result(
                RewardResult(score, reason=answer.reason, error=error, dropped=dropped, redone=redone)
            )

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
        memory = None if self.memory_gib is None else int(self.memory_gib * GIB)
        process = RewardProcess(self.functions, self.start_timeout_s, memory)
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
        """Start a replacement for an ended process; None if the pool is closed, or fails because none starts."""
        cause: Exception | None = None
        for attempt in range(START_ATTEMPTS):
            with self._changed:  # the cause may pass: a full disk, no room for a process
                if self._changed.wait_for(lambda: self._failure is not None, timeout=attempt * RETRY_S):
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


def _name(spec: RewardSpec) -> str:
    """Return a function's name for messages, with its key unless that is `reward`."""
    return repr(spec.function) if spec.key == "reward" else f"{spec.function!r} ({spec.key})"
