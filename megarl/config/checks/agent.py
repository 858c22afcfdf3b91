"""Checks of the agent's loop and its tools. Every problem comes with its fix."""

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.config.derived.datasets import all_sets, reward_functions
from megarl.config.schema import Config
from megarl.config.schema.agent import (
    ACT_TIMEOUT_S,
    HARNESS,
    SHIPPED_TOOLS,
    SINGLE_TURN,
    TOOL_AGENT,
    VERIFIERS,
    ToolConfig,
)
from megarl.config.schema.data import RewardConfig
from megarl.rewards.builtin.code import CodeReward
from megarl.sandbox.availability import sandbox_problem

_CALCULATOR = "examples.rl.tools.calculator:Calculator"


def agent_problems(config: Config) -> Iterator[str]:
    """Yield the problems of `agent` and of all lists of tools."""
    agent = config.agent
    if agent.loop == HARNESS:
        yield from _act_problems(agent.act)
    elif agent.loop not in (SINGLE_TURN, TOOL_AGENT):
        yield from import_path_problems("agent.loop", agent.loop, f"neither {SINGLE_TURN}, {TOOL_AGENT}, {HARNESS} nor")
    elif agent.kwargs:
        yield f"agent.kwargs: {agent.loop} takes none, because its bounds are keys of `agent`; remove them"
    if agent.act is not None and agent.loop != HARNESS:
        yield f"agent.act: {agent.loop} does not call it; set agent.loop: {HARNESS}, or remove it"
    own_lists = [f"{each.key}.tools" for each in all_sets(config) if each.tools]
    if agent.loop in (HARNESS, VERIFIERS):
        yield from _gateway_problems(config)
        brings = "agent.act" if agent.loop == HARNESS else "the environment"
        if own_lists:
            yield f"{'tools' if config.tools else own_lists[0]}: {brings} has its own tools; remove these"
    if agent.loop == SINGLE_TURN and own_lists:
        key = "tools" if config.tools else own_lists[0]
        yield f"{key}: {SINGLE_TURN} calls no tools; set agent.loop: {TOOL_AGENT}, or remove them"
    if agent.loop == TOOL_AGENT and not own_lists:
        yield f"tools: {TOOL_AGENT} has no tools to call; list some, or set agent.loop: {SINGLE_TURN}"
    for key, tools in tool_lists(config).items():
        yield from _tool_problems(key, tools)


def _act_problems(act: str | None) -> Iterator[str]:
    if act is None:
        yield (
            f"agent.act: agent.loop: {HARNESS} needs the function that acts; name an "
            "`async def act(base_url, token, session, row)` as package.module:function"
        )
    else:
        yield from import_path_problems("agent.act", act, "not")


def _gateway_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a loop that acts through the gateway."""
    if not config.gateway.enabled:
        yield f"gateway.enabled: agent.loop: {config.agent.loop} acts through the gateway of the run; set gateway.enabled: true"  # noqa: E501
    if config.ray.address is not None and config.gateway.host is None:
        yield (
            "gateway.host: in an existing cluster (ray.address) the gateway listens at 127.0.0.1, which agents on "
            "other nodes cannot reach; set it to the address of the gateway's node, or to 127.0.0.1 if there is one "
            "node"
        )
    key, act_s = "agent.act_timeout_s", config.agent.act_timeout_s
    if config.agent.loop == VERIFIERS:
        key, act_s = "agent.kwargs.timeout_s", config.agent.kwargs.get("timeout_s", ACT_TIMEOUT_S)
    if not isinstance(act_s, int | float):  # a loop's arguments have no types in the config: YAML's 1e3 is text
        yield f"{key}: {act_s!r} is not a number of seconds; write it in digits"
    elif act_s >= (bound := config.timeouts.generate_s):
        yield (
            f"{key}: {act_s:g} s would never fail a sample: the trainer ends the run after waiting for it for "
            f"timeouts.generate_s={bound:g} s; lower the first or raise the second"
        )


def tool_lists(config: Config) -> dict[str, list[ToolConfig]]:
    """Return the lists of tools by their keys in the config."""
    found = {"tools": config.tools}
    for section, sets in (("data", config.data.sets), ("evaluation", config.evaluation.sets)):
        for index, each in enumerate(sets):
            if each.tools is not None:
                found[f"{section}.sets.{index}.tools"] = each.tools
    return found


def _tool_problems(key: str, tools: list[ToolConfig]) -> Iterator[str]:
    for index, tool in enumerate(tools):
        if tool.kind == "calculator":
            yield f"{key}.{index}.kind: the calculator is an example; write {_CALCULATOR}, and in_worker: true"
        elif tool.kind not in SHIPPED_TOOLS:
            yield from import_path_problems(f"{key}.{index}.kind", tool.kind, f"neither {', '.join(SHIPPED_TOOLS)} nor")
    for name, count in Counter(tool.called for tool in tools).items():
        if count > 1:
            yield f"{key}: {count} tools are called {name!r}; give all but one a different `name`"


def import_path_problems(key: str, path: str, neither: str) -> Iterator[str]:
    """Yield what is wrong with an import path `package.module:name`, without importing the module."""
    module, colon, name = path.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        yield f"{key}: {path!r} is {neither} an import path package.module:name"
        return
    top = module.split(".", maxsplit=1)[0]
    try:
        found = importlib.util.find_spec(top) is not None
    except ValueError:
        found = True
    if not found and not (Path(f"{top}.py").exists() or Path(top).is_dir()):
        yield f"{key}: no module {top!r}; install it or add its directory to PYTHONPATH"


def sandbox_problems(config: Config, *, here: bool) -> Iterator[str]:
    """Yield the problems of reward functions and tools that run programs. `here`: the run is on this machine."""
    yield from _reward_problems(reward_functions(config))
    users = sandbox_users(config) if here else []
    if users and (problem := sandbox_problem()) is not None:
        for user in users:
            yield f"{user} runs programs in a sandbox, and this machine has none: {problem}"


def sandbox_users(config: Config) -> list[str]:
    """Return the keys, with values, that need the sandbox."""
    judges = [f"{key}.function: code" for key, each in reward_functions(config).items() if each.function == "code"]
    lists = tool_lists(config).items()
    tools = [f"{key}.{at}: python" for key, tools in lists for at, tool in enumerate(tools) if tool.kind == "python"]
    return judges + tools


def _reward_problems(rewards: Mapping[str, RewardConfig]) -> Iterator[str]:
    for key, reward in rewards.items():
        if reward.function != "code":
            continue
        try:
            judge = CodeReward(**reward.kwargs)
        except (TypeError, ValueError) as error:
            yield f"{key}.kwargs: {error}"
            continue
        if judge.timeout_s >= reward.timeout_s:
            yield (
                f"{key}.kwargs: timeout_s={judge.timeout_s:g}, the time of all tests of a response, is not below "
                f"reward.timeout_s={reward.timeout_s:g}, after which the sample fails; raise the latter"
            )
        if reward.memory_gib is not None and judge.limits.memory_mib > reward.memory_gib * 1024:
            yield (
                f"{key}.kwargs: memory_mib={judge.limits.memory_mib} is more than reward.memory_gib="
                f"{reward.memory_gib:g}, which also limits programs; raise the latter"
            )
