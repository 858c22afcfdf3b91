"""The checks of a run that starts on other machines, with what of it is here: its data files and its rewards."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megarl.common.errors import Findings
from megarl.common.trust.secret_references import references
from megarl.config.derived.datasets import reward_functions
from megarl.config.schema import Config
from megarl.config.schema.agent import SINGLE_TURN
from megarl.config.schema.data import RewardConfig
from megarl.data.check_files import Tell, data_file_findings, first_prompts
from megarl.run.start.checks import reward_findings, scored_sets, trial_calls
from megarl.sandbox.availability import sandbox_problem

WAY_OUT = "(--no-files of `megarl plan` and `megarl launch`, if only the machines of the run have what it needs)"


def elsewhere_findings(config: Config, tell: Tell | None = None) -> Findings:
    """Check the data files that are here, and try every reward; the notes name what is left out.

    A reward of whose sets no file is here is imported and not called. One that needs a variable or a sandbox that this
    machine does not have is not tried. `tell`: as in `check_start`.
    """
    found = Findings()
    first = first_prompts(config)
    rewards = reward_functions(config)
    lacking = {key: lack for key, own in rewards.items() if (lack := _lack(own))}
    with trial_calls(config, first, lacking) as calls:  # they start while the files are read
        found.add(data_file_findings(config, tell, only_present=True))
        tried = reward_findings(config.reward, calls)
    found.add(Findings([f"{problem}\n      {WAY_OUT}" for problem in tried.problems], tried.warnings))
    found.notes += [f"{key}.function: not tried here, because {lack}" for key, lack in lacking.items()]
    if config.reward.trial_call:
        found.notes += _uncalled({key: own for key, own in rewards.items() if key not in lacking}, config)
    found.notes.append(f"left to the start where the run will be: {', '.join(_left_out(config))}")
    return found


def _lack(reward: RewardConfig) -> str:
    """Return what a reward needs that the machines of the run may have and this one has not; empty if nothing."""
    for place, name in references(reward.kwargs, "reward.kwargs"):
        if name not in os.environ:
            return f"the environment variable {name} of {place} is not set"
    if reward.function == "code" and (problem := sandbox_problem()) is not None:
        return f"there is no sandbox: {problem}"
    return ""


def _uncalled(rewards: dict[str, RewardConfig], config: Config) -> Iterator[str]:
    """Yield a note for each reward that is called by the run, and has not been, as no file of its sets is here."""
    for key, own in rewards.items():
        scored = scored_sets(config, own)
        if scored and not any(each.path.exists() for each in scored):
            yield f"{key}.function: imported and not called, because {scored[0].key}.path is not here"


def _left_out(config: Config) -> Iterator[str]:
    yield "tokenizer and chat template"
    yield "lengths of the prompts"
    if config.agent.loop != SINGLE_TURN:
        yield "loop and tools of the agent"
    yield "weights"
    if config.checkpoint.resume != "never":
        yield "the checkpoint to resume from"
