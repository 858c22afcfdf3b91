"""Calls each reward function once before a run starts, in a killable process like the run's.

The processes start at once and the results are read later, so that other checks can run meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from megarl.common.process.child_process import StartError
from megarl.rewards.process import RewardProcess
from megarl.rewards.types import RewardInput, RewardResult, RewardSpec


@dataclass(frozen=True)
class TrialCall:
    """A reward function and its trial sample (None: only import and warm up). `row`: its source, for messages."""

    spec: RewardSpec
    sample: RewardInput | None
    row: str = ""


@dataclass(frozen=True)
class TrialProblem:
    """A problem of a function; `called`: the call failed, so another sample may succeed."""

    text: str
    called: bool


@dataclass(frozen=True)
class TrialScore:
    """The score that a function gave its sample."""

    function: str
    result: RewardResult


@contextmanager
def trials(
    calls: Sequence[TrialCall], *, timeout_s: float, start_timeout_s: float, memory_bytes: int | None
) -> Iterator[Iterator[TrialProblem | TrialScore]]:
    """Start the calls, each in its own process, and give an iterator that waits for the results.

    The processes end with the block. `timeout_s`, `start_timeout_s`, `memory_bytes`: as for the run's processes.
    """
    with ExitStack() as stack:
        started = []
        for each in calls:
            started.append((each, RewardProcess([each.spec], start_timeout_s, memory_bytes)))
            stack.callback(started[-1][1].close)
        yield (found for call, process in started if (found := _tried(call, process, timeout_s)) is not None)


def _tried(call: TrialCall, process: RewardProcess, timeout_s: float) -> TrialProblem | TrialScore | None:
    key = f"{call.spec.key}.function"
    try:
        process.wait_ready()
    except (ValueError, StartError) as error:
        text = str(error).removeprefix(f"{call.spec.key}: ")
        return TrialProblem(text if text.startswith(f"{key} ") else f"{key}: {text}", called=False)
    if call.sample is None:
        return None
    if isinstance(problem := _call(process, call.sample, timeout_s), RewardResult):
        return TrialScore(call.spec.function, problem)
    tried = f"a trial call of {call.spec.function!r} failed, with {call.row}: {problem}"
    return TrialProblem(f"{key}: {tried}", called=True)


def _call(process: RewardProcess, sample: RewardInput, timeout_s: float) -> RewardResult | str:
    """Return the reward of the sample, or why it has none."""
    payload = pickle.dumps((0, sample), protocol=pickle.HIGHEST_PROTOCOL)
    if ending := process.send([(1, payload)], timeout_s):
        return ending
    answer = process.receive(1, timeout_s)
    if answer.reason == "timeout":
        return f"no reward after {timeout_s:g} s (reward.timeout_s)"
    if answer.reason is None:
        return answer
    trace = "".join(f"\n      {line}" for line in answer.trace.splitlines()[:-1])
    return f"{answer.error}{trace}"
