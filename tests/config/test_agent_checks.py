"""Mistakes in `agent` and `tools`, each told with the way to correct it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.agent_checks import agent_problems
from megarl.config.datasets import all_sets
from megarl.config.secret_checks import referenced_variables, secret_problems
from tests.support.configs import config as config_of

CALCULATOR = {"kind": "calculator"}
PYTHON = {"kind": "python", "name": "code"}
SETS = [{"name": "a", "path": "a.jsonl"}, {"name": "b", "path": "b.jsonl", "tools": []}]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR]}, ""),
        ({"agent": {"loop": "examples.rl.agents.second_thoughts:SecondThoughts", "kwargs": {"tool": "x"}}}, ""),
        ({"tools": [CALCULATOR]}, "tools: single_turn calls none; set agent.loop: tool_agent, or remove them"),
        ({"agent": {"loop": "tool_agent"}}, "tools: tool_agent has none to call; list some"),
        ({"agent": {"loop": "toolagent"}}, "agent.loop: 'toolagent' is neither single_turn, tool_agent nor an import"),
        ({"agent": {"loop": "no_such_module_here:Loop"}}, "agent.loop: no module 'no_such_module_here'"),
        (
            {"agent": {"loop": "tool_agent", "kwargs": {"turns": 3}}, "tools": [CALCULATOR]},
            "agent.kwargs: tool_agent takes none, its bounds are keys of `agent`",
        ),
        (
            {"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR, {"kind": "calc"}]},
            "tools.1.kind: 'calc' is neither calculator, python, http nor an import path",
        ),
        (
            {"agent": {"loop": "tool_agent"}, "tools": [CALCULATOR, {"kind": "python", "name": "calculator"}]},
            "tools: 2 tools are called 'calculator'; give all but one a `name`",
        ),
    ],
)
def test_each_mistake_has_one_message(changes: dict[str, Any], problem: str) -> None:
    problems = list(agent_problems(config_of("model", **changes)))
    assert len(problems) == bool(problem) and all(each.startswith(problem) for each in problems)


def test_a_set_has_the_tools_of_the_section_or_its_own() -> None:
    config = config_of("model", agent={"loop": "tool_agent"}, tools=[CALCULATOR], data={"sets": SETS})
    assert [[tool.called for tool in each.tools] for each in all_sets(config)] == [["calculator"], []]
    assert not list(agent_problems(config))
    own = [{**SETS[0], "tools": [{"kind": "x.y:add"}]}]
    config = config_of("model", data={"sets": own}, agent={"loop": "tool_agent"})
    assert [tool.called for tool in all_sets(config)[0].tools] == ["add"]
    assert [each.split(":")[0] for each in agent_problems(config)] == ["data.sets.0.tools.0.kind"]


def test_arguments_of_tools_and_loops_may_refer_to_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"kind": "http", "kwargs": {"token": {"env": "TOOL_TOKEN"}, "api_key": "told"}}]
    loop = {"loop": "x.y:Z", "kwargs": {"key": {"env": "LOOP_KEY"}}}
    config = config_of("model", agent=loop, tools=tools)
    assert referenced_variables(config) == {
        "LOOP_KEY": "agent.kwargs.key", "TOOL_TOKEN": "tools.0.kwargs.token"
    }  # fmt: skip
    assert any(
        each.startswith("tools.0.kwargs.api_key: by its name a secret") for each in secret_problems(config, here=False)
    )
