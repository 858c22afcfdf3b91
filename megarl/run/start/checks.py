"""The checks before a run starts, beyond its plan: everything that the run will open and call is tried once.

Data files, tokenizer and chat template, the lengths of the prompts, the agent's loop and tools, the headers of the
weights, and one call of each reward function. A mistake would otherwise show when engines and trainer are up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from megarl.chat.formats import Prompt
from megarl.checkpoint.save.resume import resume_problems
from megarl.common.errors import Findings
from megarl.config.derived.datasets import all_sets
from megarl.config.schema import Config
from megarl.config.schema.agent import SINGLE_TURN
from megarl.data.check_files import Tell, data_file_findings, first_prompts
from megarl.data.check_tokenizer import tokenizer_findings
from megarl.models.architecture.architecture import ModelInfo
from megarl.run.start.check_rewards import reward_findings, trial_calls

CHECKED_BY_VARIABLE = "MEGARL_CHECKED_BY"  # the pid of a `megarl train` that has become torchrun


def check_start(config: Config, info: ModelInfo, tell: Tell | None = None) -> list[str]:
    """Try what the run will open and call; return warnings. Raises ConfigError that lists every problem.

    With `tell` every wrong row of the data files is told when it is found, and the problems have ten of each kind.
    Of large files the first rows are checked, with `tell` all.
    """
    found = start_findings(config, info, tell)
    found.refuse()
    return found.warnings


def start_findings(config: Config, info: ModelInfo, tell: Tell | None = None) -> Findings:
    """Try what the run will open and call. `tell`: as in `check_start`."""
    from megarl.checkpoint.format.load_weights import weight_problems

    first = first_prompts(all_sets(config))
    found = Findings()
    with trial_calls(config, first) as calls:  # they start while the files are read
        found.add(data_file_findings(all_sets(config), tell))
        found.add(_tokenizer_and_agent(config, info, first, whole=tell is not None))
        found.add(Findings(list(weight_problems(config, info))))
        found.add(Findings(list(resume_problems(config, info))))
        found.add(reward_findings(config.reward, calls))
    return found


def _tokenizer_and_agent(config: Config, info: ModelInfo, first: Mapping[str, Prompt], *, whole: bool) -> Findings:
    """Check the tokenizer, the lengths of the prompts, and the agent, whose tools the prompts show."""
    if config.agent.loop == SINGLE_TURN:
        return tokenizer_findings(config, info, first, whole=whole)
    from megarl.rollout.agents.check_agent import try_agent  # its imports take a second, which single turns do not need

    agent = try_agent(config)
    found = tokenizer_findings(config, info, first, agent.schemas, whole=whole)
    found.add(Findings(agent.problems))
    return found


def mark_checked(environment: MutableMapping[str, str]) -> None:
    """Tell the ranks of the torchrun that this process becomes that `check_start` has passed."""
    environment[CHECKED_BY_VARIABLE] = str(os.getpid())


def is_checked(environment: Mapping[str, str]) -> bool:
    """Tell whether the process that has started this rank has passed `check_start`."""
    return environment.get(CHECKED_BY_VARIABLE) == str(os.getppid())
