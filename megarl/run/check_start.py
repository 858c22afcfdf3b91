"""The checks before a run starts, beyond its plan: everything that the run will open and call is tried once.

Data files, tokenizer and chat template, the agent's loop and tools, the headers of the weights, and one call of each
reward function. A mistake would otherwise show when engines and trainer are up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from megarl.checkpoint.save.resume import resume_problems
from megarl.common.byte_units import GIB
from megarl.common.errors import ConfigError
from megarl.config.agent_sections import SINGLE_TURN
from megarl.config.data_sections import RewardConfig
from megarl.config.datasets import TrainSet, all_sets, reward_functions
from megarl.config.schema import Config
from megarl.data.check_files import Tell, data_file_problems, first_prompts
from megarl.data.check_tokenizer import tokenizer_problems
from megarl.data.formats import Prompt
from megarl.models.info import ModelInfo
from megarl.rewards.trial_call import TrialCall, TrialCalls
from megarl.rewards.types import RewardInput, RewardSpec, Turn

CHECKED_BY_VARIABLE = "MEGARL_CHECKED_BY"  # the pid of a `megarl train` that has become torchrun


def check_start(config: Config, info: ModelInfo, tell: Tell | None = None) -> list[str]:
    """Try what the run will open and call; return warnings. Raises ConfigError that lists every problem.

    With `tell` every wrong row of the data files is told when it is found, and the problems have ten of each kind.
    A trial call that fails is a warning where the config says what becomes of such samples: `reward.on_error` is a
    number, or `reward.max_error_share` is 1.
    """
    from megarl.checkpoint.format.check_weights import weight_problems

    first = first_prompts(config)
    problems: list[str] = []
    warnings: list[str] = []
    with _trial_calls(config, first) as calls:  # they start while the files are read
        problems += data_file_problems(config, tell)
        problems += _tokenizer_and_agent(config, first)
        problems += weight_problems(config, info)
        problems += resume_problems(config, info)
        for each in calls.problems():
            if each.called and _expects_failures(config.reward):
                warnings.append(each.text)
            elif each.called:
                problems.append(f"{each.text}\n      (reward.trial_call: false if it may fail or must not be called)")
            else:
                problems.append(each.text)
    if problems:
        raise ConfigError(problems)
    return warnings


def _tokenizer_and_agent(config: Config, first: Mapping[str, Prompt]) -> list[str]:
    """Return what is wrong with the tokenizer and the agent, whose tools the prompts show."""
    if config.agent.loop == SINGLE_TURN:
        return tokenizer_problems(config, first)
    from megarl.rollout.check_agent import try_agent  # its imports take a second, which single turns do not need

    agent = try_agent(config)
    return tokenizer_problems(config, first, agent.schemas) + agent.problems


def mark_checked(environment: MutableMapping[str, str]) -> None:
    """Tell the ranks of the torchrun that this process becomes that `check_start` has passed."""
    environment[CHECKED_BY_VARIABLE] = str(os.getpid())


def is_checked(environment: Mapping[str, str]) -> bool:
    """Tell whether the process that has started this rank has passed `check_start`."""
    return environment.get(CHECKED_BY_VARIABLE) == str(os.getppid())


def _expects_failures(reward: RewardConfig) -> bool:
    return reward.on_error != "drop" or reward.max_error_share >= 1


def _trial_calls(config: Config, first: Mapping[str, Prompt]) -> TrialCalls:
    reward = config.reward
    calls = []
    for key, own in reward_functions(config).items():
        sample, row = _sample(config, own, first) if reward.trial_call else (None, "")
        calls.append(TrialCall(RewardSpec(own.function, own.kwargs, key), sample, row))
    return TrialCalls(
        calls,
        timeout_s=reward.timeout_s,
        start_timeout_s=config.timeouts.engine_start_s,
        memory_bytes=None if reward.memory_gib is None else int(reward.memory_gib * GIB),
    )


def _sample(config: Config, reward: RewardConfig, first: Mapping[str, Prompt]) -> tuple[RewardInput | None, str]:
    """Return a response to the first prompt of a set that `reward` scores, and what it is; None if there is no set.

    The response is the reference answer, as if the model had written nothing else.
    """
    for each in all_sets(config):
        shown = isinstance(each, TrainSet) and each.demonstrates
        prompt = first.get(each.key)
        if shown or prompt is None or each.reward != reward:
            continue
        ids = list(range(len(prompt.answer)))
        several = config.agent.loop != SINGLE_TURN
        turns = (Turn("assistant", prompt.answer, len(ids)),) if several else ()
        sample = RewardInput(prompt.text, prompt.answer, ids, "stop", prompt.answer, prompt.row, turns)
        return sample, f"the first row of {each.path} and its answer {prompt.answer!r:.60} as the response"
    return None, ""
