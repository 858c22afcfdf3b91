"""One call of each reward function before a run starts, in a process as the run's own, which can be killed.

The processes start when the calls are made, and the results are asked for later, so that other checks go on meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from megarl.rewards.process import (
    ForeignAnswerError,
    RewardProcess,
    StartError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from megarl.rewards.types import RewardInput, RewardSpec


@dataclass(frozen=True)
class TrialCall:
    """A reward function, and the sample that it is tried with; None: it is only imported and warmed up.

    `row`: where the sample is from, for messages.
    """

    spec: RewardSpec
    sample: RewardInput | None
    row: str = ""


@dataclass(frozen=True)
class TrialProblem:
    """A problem of a function; `called`: it was the call that failed, so it may succeed for another sample."""

    text: str
    called: bool


class TrialCalls:
    """The trial calls of several functions, each in a process of its own. A context manager, which ends the processes.

    `timeout_s`, `start_timeout_s` and `memory_bytes` are those of the run's processes.
    """

    def __init__(
        self, calls: Sequence[TrialCall], *, timeout_s: float, start_timeout_s: float, memory_bytes: int | None
    ) -> None:
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._calls: list[tuple[TrialCall, RewardProcess]] = []
        for each in calls:
            process = RewardProcess([each.spec], start_timeout_s, memory_bytes)
            self._stack.callback(process.close)
            self._calls.append((each, process))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def problems(self) -> Iterator[TrialProblem]:
        """Wait for the results, within the bounds of the constructor, and yield what is wrong."""
        for call, process in self._calls:
            key = f"{call.spec.key}.function"
            try:
                process.wait_ready()
            except (ValueError, StartError) as error:
                text = str(error).removeprefix(f"{call.spec.key}: ")
                yield TrialProblem(text if text.startswith(f"{key} ") else f"{key}: {text}", called=False)
                continue
            if call.sample is not None and (problem := self._call(process, call.sample)):
                tried = f"a trial call of {call.spec.function!r} failed, with {call.row}: {problem}"
                yield TrialProblem(f"{key}: {tried}", called=True)

    def _call(self, process: RewardProcess, sample: RewardInput) -> str:
        """Return why the sample has no reward; empty if it has one."""
        try:
            process.send([(1, pickle.dumps((0, sample), protocol=pickle.HIGHEST_PROTOCOL))], self._timeout_s)
            answer = process.receive(1, self._timeout_s)
        except WorkerTimeoutError:
            return f"no reward after {self._timeout_s:g} s (reward.timeout_s)"
        except (WorkerDiedError, ForeignAnswerError) as error:
            return str(error)
        if answer.result is not None:
            return ""
        trace = "".join(f"\n      {line}" for line in answer.trace.splitlines()[:-1])
        return f"{answer.message}{trace}"
