"""Checks before a run starts, beyond its plan: each file is opened and each function called once.

These are data files, tokenizer and chat template, prompt lengths, the agent's loop and tools, weight headers, and one
call of each reward function. Without the checks a mistake would only show once engines and trainer are up.
"""

import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from megarl.chat.formats import Prompt
from megarl.checkpoint.save.resume import resume_problems
from megarl.common.errors import Findings
from megarl.common.process.child_process import StartError
from megarl.common.values import GIB
from megarl.config.checks.sections import detect_device
from megarl.config.derived.datasets import HeldOutSet, TrainSet, all_sets, reward_functions
from megarl.config.schema import Config, TrainerConfig
from megarl.config.schema.agent import SINGLE_TURN
from megarl.config.schema.data import RewardConfig
from megarl.data.check_files import ReportMistake, data_file_findings, first_prompts
from megarl.data.check_tokenizer import tokenizer_findings
from megarl.models.architecture.architecture import ModelInfo
from megarl.rewards.process import RewardProcess
from megarl.rewards.types import RewardInput, RewardResult, RewardSpec, Turn

# Calls each reward function once before a run starts, in a killable process like the run's.
#
# The processes start at once and the results are read later, so that other checks can run meanwhile.


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


Trials = AbstractContextManager[Iterator[TrialProblem | TrialScore]]


def trial_calls(config: Config, first: Mapping[str, Prompt], left_out: Collection[str] = ()) -> Trials:
    """Start the trial of every reward, without those whose keys are in `left_out`.

    `first`: the first prompt of each set by the set's key; a reward without one is imported and not called.
    """
    reward, sets, several = config.reward, all_sets(config), config.agent.loop != SINGLE_TURN
    calls = []
    for key, own in reward_functions(config).items():
        if key in left_out:
            continue
        sample, row = _sample(scored_sets(sets, own), first, several=several) if reward.trial_call else (None, "")
        calls.append(TrialCall(RewardSpec(own.function, own.kwargs, key), sample, row))
    return trials(
        calls,
        timeout_s=reward.timeout_s,
        start_timeout_s=config.timeouts.engine_start_s,
        memory_bytes=None if reward.memory_gib is None else int(reward.memory_gib * GIB),
    )


def reward_findings(reward: RewardConfig, results: Iterator[TrialProblem | TrialScore]) -> Findings:
    """Wait for the trial of the rewards.

    A failed call is only a warning if the config says how to treat such samples: `reward.on_error` is a number, or
    `reward.max_error_share` is 1.
    """
    found = Findings()
    for each in results:
        if isinstance(each, TrialScore):
            parts = "".join(f", {name} {value:g}" for name, value in each.result.components.items())
            found.seen.append(("reward", f"{each.function}: {each.result.score:g} for the reference answer{parts}"))
        elif each.called and reward.expects_failures:
            found.warnings.append(each.text)
        elif each.called:
            hint = "(reward.trial_call: false if it may fail or must not be called)"
            found.problems.append(f"{each.text}\n      {hint}")
        else:
            found.problems.append(each.text)
    return found


def scored_sets(sets: Iterable[TrainSet | HeldOutSet], reward: RewardConfig) -> list[TrainSet | HeldOutSet]:
    """Return those of the sets whose responses `reward` scores; those of demonstrations are not scored."""
    scored = [each for each in sets if each.reward == reward]
    return [each for each in scored if not (isinstance(each, TrainSet) and each.demonstrates)]


def _sample(
    scored: Iterable[TrainSet | HeldOutSet], first: Mapping[str, Prompt], *, several: bool
) -> tuple[RewardInput | None, str]:
    """Return a response to the first prompt of a set that a reward scores, and its description; None if there is no
    set. The response is the reference answer alone. `several`: it may have turns.
    """
    for each in scored:
        prompt = first.get(each.key)
        if prompt is None:
            continue
        ids = list(range(len(prompt.answer)))
        turns = (Turn("assistant", prompt.answer, len(ids)),) if several else ()
        sample = RewardInput(prompt.text, prompt.answer, ids, "stop", prompt.answer, prompt.row, turns)
        return sample, f"the first row of {each.path} and its answer {prompt.answer!r:.60} as the response"
    return None, ""


CHECKED_BY_VARIABLE = "MEGARL_CHECKED_BY"  # the pid of a `megarl train` that has become torchrun


def check_start(config: Config, info: ModelInfo, report: ReportMistake | None = None) -> Findings:
    """Try what the run will open and call; return the findings. Raises ConfigError that lists every problem.

    With `report` whole data files are read and every wrong row is shown when found. Otherwise only the first rows of
    large files are checked. The problems list ten rows of each kind.
    """
    found = start_findings(config, info, report)
    found.refuse()
    return found


def start_findings(config: Config, info: ModelInfo, report: ReportMistake | None = None) -> Findings:
    """Try what the run will open and call. `report`: as in `check_start`."""
    from megarl.checkpoint.format.load_weights import weight_problems

    first = first_prompts(all_sets(config))
    found = Findings()
    loaded = {"model.path": config.model.path} if config.model.load_weights else {}
    if config.needs_reference and config.reference.path is not None:
        loaded["reference.path"] = config.reference.path
    with trial_calls(config, first) as calls:  # they start while the files are read
        found.add(data_file_findings(all_sets(config), report))
        found.add(_tokenizer_and_agent(config, info, first, whole=report is not None))
        found.add(Findings(list(weight_problems(loaded, info))))
        found.add(Findings(list(resume_problems(config, info)), list(_missing_kernels(config.trainer, info))))
        found.add(reward_findings(config.reward, calls))
    return found


def _missing_kernels(trainer: TrainerConfig, info: ModelInfo) -> Iterator[str]:
    """Yield a warning if DeltaNet layers would run on GPUs without the kernels that the plan counts on."""
    if info.delta and trainer.precision == "bf16" and detect_device() == "cuda" and find_spec("fla") is None:
        yield (
            "fla-core is not installed: the trainer's Gated DeltaNet layers run in PyTorch, which is slower and needs "
            "more memory than the plan counts; run make setup-gpu"
        )


def _tokenizer_and_agent(config: Config, info: ModelInfo, first: Mapping[str, Prompt], *, whole: bool) -> Findings:
    """Check the tokenizer, the lengths of the prompts with the tools that they show, and the agent."""
    if config.agent.loop == SINGLE_TURN:
        return tokenizer_findings(config, info, first, whole=whole)
    from megarl.rollout.agents.check_agent import (
        try_agent,
    )  # importing it takes a second, which single turns do not need

    problems, schemas = try_agent(config)
    found = tokenizer_findings(config, info, first, schemas, whole=whole)
    found.add(Findings(problems))
    return found


def mark_checked(environment: MutableMapping[str, str]) -> None:
    """Record, for the ranks of the torchrun that this process becomes, that `check_start` has passed."""
    environment[CHECKED_BY_VARIABLE] = str(os.getpid())


def is_checked(environment: Mapping[str, str]) -> bool:
    """Return whether the process that started this rank has passed `check_start`."""
    return environment.get(CHECKED_BY_VARIABLE) == str(os.getppid())
