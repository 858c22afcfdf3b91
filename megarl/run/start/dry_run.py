"""The dry run of a config: check everything possible on this machine, print config and plan, start nothing."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarl.common.errors import Findings
from megarl.common.trust.secret_references import references
from megarl.config.checks.sections import DeviceType, absent_files, planned_elsewhere
from megarl.config.derived.datasets import HeldOutSet, TrainSet, all_sets, reward_functions
from megarl.config.loading.load import apply_overrides
from megarl.config.memory_plan.plan import RunPlan, make_plan
from megarl.config.memory_plan.plan_tables import print_dry_run
from megarl.config.schema import Config
from megarl.config.schema.agent import SINGLE_TURN, AgentConfig
from megarl.config.schema.data import RewardConfig
from megarl.config.schema.job import CheckpointConfig
from megarl.data.check_files import ReportMistake, data_file_findings, first_prompts
from megarl.run.start.checks import reward_findings, scored_sets, start_findings, trial_calls
from megarl.sandbox.availability import sandbox_problem

WAY_OUT = "(--no-files of `megarl plan` and `megarl launch`, if only the machines of the run have what it needs)"


def elsewhere_findings(config: Config, report: ReportMistake | None = None) -> Findings:
    """Check the data files on this machine, and try every reward; the notes name what is left out.

    A reward without a local data file is imported but not called. A reward that needs a missing variable or sandbox is
    not tried. `report`: as in `check_start`.
    """
    found = Findings()
    first = first_prompts(all_sets(config))
    rewards = reward_functions(config)
    lacking = {key: lack for key, own in rewards.items() if (lack := _lack(own))}
    with trial_calls(config, first, lacking) as calls:  # they start while the files are read
        found.add(data_file_findings(all_sets(config), report, only_present=True))
        tried = reward_findings(config.reward, calls)
    tried.problems = [f"{problem}\n      {WAY_OUT}" for problem in tried.problems]
    found.add(tried)
    found.notes += [f"{key}.function: not tried here, because {lack}" for key, lack in lacking.items()]
    if config.reward.trial_call:
        found.notes += _uncalled({key: own for key, own in rewards.items() if key not in lacking}, all_sets(config))
    found.notes.append(
        f"not checked here, only where the run starts: {', '.join(_left_out(config.agent, config.checkpoint))}"
    )
    return found


def _lack(reward: RewardConfig) -> str:
    """Return what a reward needs and this machine lacks, although the run's machines may have it; empty if nothing."""
    for place, name in references(reward.kwargs, "reward.kwargs"):
        if name not in os.environ:
            return f"the environment variable {name} of {place} is not set"
    if reward.function == "code" and (problem := sandbox_problem()) is not None:
        return f"there is no sandbox: {problem}"
    return ""


def _uncalled(rewards: dict[str, RewardConfig], sets: Sequence[TrainSet | HeldOutSet]) -> Iterator[str]:
    """Yield a note for each reward of the run that was not called because no file of its sets is here."""
    for key, own in rewards.items():
        scored = scored_sets(sets, own)
        if scored and not any(each.path.exists() for each in scored):
            yield f"{key}.function: imported but not called, because {scored[0].key}.path is not here"


def _left_out(agent: AgentConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    yield "tokenizer and chat template"
    yield "lengths of the prompts"
    if agent.loop != SINGLE_TURN:
        yield "loop and tools of the agent"
    yield "weights"
    if checkpoint.resume != "never":
        yield "the checkpoint to resume from"


def dry_run(
    config: Config,
    stream: TextIO,
    *,
    overrides: Sequence[str] = (),
    device: DeviceType | None = None,
    files: bool = True,
    report: ReportMistake | None = None,
    whole: bool = False,
) -> None:
    """Check `config` as `checked_plan` does, and print findings, plan and config (`print_dry_run`)."""
    plan, found = checked_plan(config, overrides=overrides, device=device, files=files, report=report)
    print_dry_run(plan, config, stream, found, whole=whole)


def checked_plan(
    config: Config,
    *,
    overrides: Sequence[str] = (),
    device: DeviceType | None = None,
    files: bool = True,
    report: ReportMistake | None = None,
) -> tuple[RunPlan, Findings]:
    """Check everything possible here; return plan and findings. Raises ConfigError that lists every problem.

    `files=False` skips data, weights, tokenizer and rewards. If the model is not on this machine, `model.shape` is
    planned. What is absent then becomes a note, or a mistake if one of the config's `overrides` names it. Present data
    files and the rewards are still checked. Unless `device` is given, such a plan is for GPUs if the config says what
    memory they have, else for this machine's own device. `report`: as in `check_start`.
    """
    elsewhere = planned_elsewhere(config.model)
    if elsewhere and device is None and config.trainer.device_memory_gib is not None:
        device = "cuda"
    plan = make_plan(config, device=device, files=files and not elsewhere)
    if not files:
        return plan, Findings()
    if not elsewhere:
        found = start_findings(config, plan.info, report)
        found.refuse()
        return plan, found
    absent = absent_files(config)
    found = Findings(list(_mistyped(absent, overrides)))
    found.add(elsewhere_findings(config, report))
    found.refuse()
    listed = ", ".join(f"{key} ({path})" for key, path in absent)
    found.notes.insert(
        0, f"planned by model.shape; not on this machine, so not checked, but needed where the run starts: {listed}"
    )
    return plan, found


def _mistyped(absent: Sequence[tuple[str, Path]], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each missing path that the user gave: a shipped recipe does not need its files here."""
    given = apply_overrides({}, overrides)  # valid for the tree to which they belong
    for key, path in absent:
        if _names(given, key):
            yield (
                f"{key}: no such file or directory: {path} (on the command line; current directory: {os.getcwd()}); "
                "correct it, or plan without files: megarl plan --no-files"
            )


def _names(tree: object, key: str) -> bool:
    """Return whether a tree of plain values has a dotted key, in which numbers are places in lists."""
    node: Any = tree  # of any type, as YAML has it
    for name in key.split("."):
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return False
    return True
