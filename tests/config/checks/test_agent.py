"""Mistakes in `agent` and `tools`, each reported with the way to correct it."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from megarl.config.checks.agent import agent_problems
from megarl.config.checks.secrets import referenced_variables, secret_problems
from megarl.config.derived.datasets import all_sets
from megarl.config.schema import agent
from tests.support.trainer.configs import config as config_of

VERIFIERS = "megarl.environments.verifiers_loop:Verifiers"
HARNESS = {"loop": "harness", "act": "tests.support.gateway.acts:two_turns"}
GATEWAY = {"enabled": True}
CALCULATOR = {"kind": "json:calculator"}
PYTHON = {"kind": "python", "name": "code"}
SETS = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "tools": []}]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR]}, ""),
        ({"agent": {"loop": "examples.rl.agents.second_thoughts:SecondThoughts", "kwargs": {"tool": "x"}}}, ""),
        ({"tools": [CALCULATOR]}, "tools: single_turn calls no tools; set agent.loop: tool_agent, or remove them"),
        ({"agent": {"loop": "tool_agent"}}, "tools: tool_agent has no tools to call; list some"),
        ({"agent": {"loop": "toolagent"}}, "agent.loop: 'toolagent' is neither single_turn, tool_agent, harness nor"),
        ({"agent": {"loop": "no_such_module_here:Loop"}}, "agent.loop: no module 'no_such_module_here'"),
        (
            {"agent": {"loop": "tool_agent", "kwargs": {"turns": 3}}, "tools": [CALCULATOR]},
            "agent.kwargs: tool_agent takes none, because its bounds are keys of `agent`",
        ),
        ({"agent": HARNESS, "gateway": {"enabled": True}}, ""),
        (
            {"agent": HARNESS},
            "gateway.enabled: agent.loop: harness acts through the gateway of the run; set gateway.enabled",
        ),
        (
            {"agent": {"loop": "harness"}, "gateway": {"enabled": True}},
            "agent.act: agent.loop: harness needs the function that acts; name an `async def act(",
        ),
        (
            {"agent": HARNESS | {"act": "acts"}, "gateway": {"enabled": True}},
            "agent.act: 'acts' is not an import path package.module:name",
        ),
        (
            {"agent": HARNESS | {"act_timeout_s": 600}, "gateway": GATEWAY, "timeouts": {"generate_s": 600}},
            "agent.act_timeout_s: 600 s would never fail a sample: the trainer ends the run after "
            "waiting for it for timeouts.generate_s=600 s; lower the first or raise the second",
        ),
        ({"agent": HARNESS | {"act_timeout_s": 599}, "gateway": GATEWAY, "timeouts": {"generate_s": 600}}, ""),
        ({"timeouts": {"generate_s": 600}}, ""),
        (
            {"agent": HARNESS, "gateway": GATEWAY, "ray": {"address": "10.0.0.9:6379"}},
            "gateway.host: in an existing cluster (ray.address) the gateway listens at 127.0.0.1, which agents on "
            "other nodes cannot reach; set it to the address of the gateway's node",
        ),
        ({"agent": HARNESS, "gateway": GATEWAY | {"host": "10.0.0.9"}, "ray": {"address": "10.0.0.9:6379"}}, ""),
        (
            {"agent": {"act": "tests.support.gateway.acts:two_turns"}},
            "agent.act: single_turn does not call it; set agent.loop",
        ),
        (
            {"agent": HARNESS, "gateway": {"enabled": True}, "tools": [CALCULATOR]},
            "tools: agent.act has its own tools; remove these",
        ),
        (
            {"agent": {"loop": "tool_agent"}, "tools": [{"kind": "calculator"}]},
            "tools.0.kind: the calculator is an example; write examples.rl.tools.calculator:Calculator, and "
            "in_worker: true",
        ),
        (
            {"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR, {"kind": "calc"}]},
            "tools.1.kind: 'calc' is neither python, http nor an import path",
        ),
        (
            {"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR, {"kind": "python", "name": "calculator"}]},
            "tools: 2 tools are called 'calculator'; give all but one a different `name`",
        ),
    ],
)
def test_each_mistake_has_one_message(changes: dict[str, Any], problem: str) -> None:
    problems = list(agent_problems(config_of("model", **changes)))
    assert len(problems) == bool(problem) and all(each.startswith(problem) for each in problems)


def verifiers(**kwargs: Any) -> dict[str, Any]:
    """A section `agent` whose environment is one of verifiers."""
    return {"loop": VERIFIERS, "kwargs": {"taskset": "digits_tasks", **kwargs}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agent": verifiers(), "gateway": GATEWAY}, ""),
        (
            {"agent": verifiers()},
            f"gateway.enabled: agent.loop: {VERIFIERS} acts through the gateway of the run; set gateway.",
        ),
        (
            {"agent": verifiers(), "gateway": GATEWAY, "timeouts": {"generate_s": 1500}},
            "agent.kwargs.timeout_s: 1500 s would never fail a sample: the trainer ends the run after "
            "waiting for it for timeouts.generate_s=1500 s; lower the first or raise the second",
        ),
        ({"agent": verifiers(timeout_s=599), "gateway": GATEWAY, "timeouts": {"generate_s": 600}}, ""),
        # That bound is of `act` alone.
        ({"agent": verifiers() | {"act_timeout_s": 1800}, "gateway": GATEWAY}, ""),
        (
            {"agent": verifiers(timeout_s="1e3"), "gateway": GATEWAY},
            "agent.kwargs.timeout_s: '1e3' is not a number of seconds; write it in digits",
        ),
        (
            {"agent": verifiers(), "gateway": GATEWAY, "tools": [CALCULATOR]},
            "tools: the environment has its own tools; remove these",
        ),
        ({"agent": {"loop": "x.y:Verifiers", "kwargs": {"timeout_s": 1e9}}}, "agent.loop: no module 'x'"),
    ],
)
def test_the_loop_of_verifiers_needs_of_the_gateway_what_a_harness_does(changes: dict[str, Any], problem: str) -> None:
    problems = list(agent_problems(config_of("model", **changes)))
    assert len(problems) == bool(problem) and all(each.startswith(problem) for each in problems), problems


def test_the_loop_of_verifiers_is_the_one_that_is_checked() -> None:
    """The checks know its import path and its default time-out without importing it."""
    module, _, name = VERIFIERS.partition(":")
    loop = getattr(importlib.import_module(module), name)
    default = inspect.signature(loop).parameters["timeout_s"].default
    assert agent.VERIFIERS == VERIFIERS and default == agent.ACT_TIMEOUT_S


def test_a_set_has_the_tools_of_the_section_or_its_own() -> None:
    config = config_of("model", agent={"loop": "tool_agent"}, tools=[CALCULATOR], data={"sets": SETS})
    assert [[tool.called for tool in each.tools] for each in all_sets(config)] == [["calculator"], []]
    assert not list(agent_problems(config))
    own = [{**SETS[0], "tools": [{"kind": "x.y:add"}]}]
    config = config_of("model", data={"sets": own}, agent={"loop": "tool_agent"})
    assert [tool.called for tool in all_sets(config)[0].tools] == ["add"]
    assert [each.split(":")[0] for each in agent_problems(config)] == ["data.sets.0.tools.0.kind"]


def test_arguments_of_tools_and_loops_may_refer_to_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"kind": "http", "kwargs": {"token": {"env": "TOOL_TOKEN"}, "api_key": "literal"}}]
    loop = {"loop": "x.y:Z", "kwargs": {"key": {"env": "LOOP_KEY"}}}
    config = config_of("model", agent=loop, tools=tools)
    assert referenced_variables(config) == {
        "LOOP_KEY": "agent.kwargs.key", "TOOL_TOKEN": "tools.0.kwargs.token"
    }  # fmt: skip
    assert any(
        each.startswith("tools.0.kwargs.api_key: its name says that it is a secret")
        for each in secret_problems(config, here=False)
    )
