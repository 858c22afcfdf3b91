"""Checks of what needs the sandbox: the reward function `code`, and the tool `python`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.checks.agent import tool_lists
from megarl.config.derived.datasets import reward_functions
from megarl.config.schema import Config
from megarl.rewards.builtin.code import CodeReward
from megarl.sandbox.availability import sandbox_problem


def sandbox_problems(config: Config, *, here: bool) -> Iterator[str]:
    """Yield the problems of reward functions and tools that run programs. `here`: the run will be on this machine."""
    yield from _reward_problems(config)
    if here:
        yield from _without_sandbox(config)


def sandbox_users(config: Config) -> list[str]:
    """Return the keys of what needs the sandbox, each with its value."""
    judges = [f"{key}.function: code" for key, each in reward_functions(config).items() if each.function == "code"]
    lists = tool_lists(config).items()
    tools = [f"{key}.{at}: python" for key, tools in lists for at, tool in enumerate(tools) if tool.kind == "python"]
    return judges + tools


def _without_sandbox(config: Config) -> Iterator[str]:
    users = sandbox_users(config)
    if users and (problem := sandbox_problem()) is not None:
        for user in users:
            yield f"{user} runs programs in a sandbox, and there is none here: {problem}"


def _reward_problems(config: Config) -> Iterator[str]:
    judges = {key: each for key, each in reward_functions(config).items() if each.function == "code"}
    for key, reward in judges.items():
        try:
            judge = CodeReward(**reward.kwargs)
        except (TypeError, ValueError) as error:
            yield f"{key}.kwargs: {error}"
            continue
        if judge.timeout_s >= config.reward.timeout_s:
            yield (
                f"{key}.kwargs: timeout_s={judge.timeout_s:g}, the time of all tests of a response, is not below "
                f"reward.timeout_s={config.reward.timeout_s:g}, after which the sample has failed; raise the latter"
            )
        if reward.memory_gib is not None and judge.limits.memory_mib > reward.memory_gib * 1024:
            yield (
                f"{key}.kwargs: memory_mib={judge.limits.memory_mib} is more than reward.memory_gib="
                f"{reward.memory_gib:g}, which holds for programs too; raise the latter"
            )
