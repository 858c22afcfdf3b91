"""The checks before a start try the agent: its loop, every tool, and the chat template with the tools."""

import threading
from pathlib import Path
from typing import Any

from megarl.config.loading.load import config_from_tree
from megarl.models.hf.read_config import load_info
from megarl.run.start.checks import check_start
from tests.support.models.chat_templates import CHATML_TOOLS
from tests.support.trainer.check_start import problems_of
from tests.support.trainer.configs import config, tree

SHARE = "tests.support.rewards.reward_functions:digit_share"
ROOMY: dict[str, Any] = {"data__max_prompt_tokens": 2048}  # for the schemas of tools, letter by letter
NO_TOOLS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
DROPS_TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %}<|end|>{% endif %}{% endfor %}"
)
DIGITS = "examples.rl.agents.digits:Digits"
LOOP = "examples.rl.agents.second_thoughts:SecondThoughts"


def agent_problems_of(model: Path, data: Path, template: str = "", **changes: Any) -> list[str]:
    if template:
        (model / "chat_template.jinja").write_text(template)
    sections = {"agent__loop": "tool_agent", "agent__tool_format": "hermes", "reward__function": SHARE, **changes}
    return problems_of(config(model, data, reward__trial_call=False, **sections))


def test_a_tool_agent_needs_a_template_that_shows_tools_and_only_appends(model: Path, data: Path) -> None:
    tools = [{"kind": "examples.rl.tools.calculator:Calculator"}]
    [problem] = agent_problems_of(model, data, NO_TOOLS, tools=tools)
    assert problem.startswith("data: the chat template does not show tools to the model; use the template of")
    [problem] = agent_problems_of(model, data, DROPS_TURNS, tools=tools, **ROOMY)
    assert problem.startswith("data: the chat template changes the text before a message") and "appends" in problem
    [problem] = agent_problems_of(model, data, CHATML_TOOLS, tools=tools, agent__tool_format="template", **ROOMY)
    assert problem.startswith("data: ") and "set agent.tool_format: hermes" in problem


def test_every_tool_that_cannot_be_made_is_reported_once_with_the_template_that_fails_the_others(
    model: Path, data: Path
) -> None:
    wrong, unused = (
        {"kind": "examples.rl.tools.calculator:Calculator", "kwargs": {"x": 3}},
        {"kind": "json:no_such_function"},
    )
    sets = [
        {"name": "a", "path": str(data), "tools": [wrong, {"kind": DIGITS}]},
        {"name": "b", "path": str(data), "tools": [wrong, {"kind": DIGITS, "kwargs": {"base": 7}, "name": "other"}]},
    ]
    agent = {"loop": LOOP, "kwargs": {"tool": "digits", "tokens": 3}, "tool_format": "hermes"}
    (model / "chat_template.jinja").write_text(NO_TOOLS)
    base = tree(model, data, reward__function=SHARE, reward__trial_call=False)
    reported = problems_of(config_from_tree({**base, "data": {"sets": sets}, "agent": agent, "tools": [unused]}))
    assert [each.partition(":")[0] for each in reported] == [
        "data.sets.0", "agent.loop", "data.sets.0.tools.0", "data.sets.1.tools.1"
    ]  # fmt: skip
    assert "does not show tools" in reported[0]
    assert "cannot be made with agent.kwargs: " in reported[1] and "'tokens'" in reported[1]
    assert "calculator:Calculator' cannot be made: " in reported[2] and "'x'" in reported[2]
    assert f"{DIGITS!r} cannot be made: its class failed with TypeError: " in reported[3]


def test_what_an_agent_of_ones_own_names_is_imported(sound: Path, data: Path) -> None:
    own: dict[str, Any] = {"agent__loop": LOOP.replace("Thoughts", "Thought"), "tools": [{"kind": f"{DIGITS}2"}]}
    loop, tool = agent_problems_of(sound, data, **own)
    assert loop.startswith(f"agent.loop: {own['agent__loop']!r} cannot be imported: AttributeError")
    assert tool.startswith("tools.0: ") and "cannot be imported: AttributeError" in tool
    acts: dict[str, Any] = {"agent__loop": "harness", "agent__act": "json:loads", "gateway__enabled": True}
    [problem] = agent_problems_of(sound, data, **acts)
    assert problem == "agent.act: 'json:loads' must be an `async def act(base_url, token, session, row)`"


def test_the_tools_that_were_tried_are_closed(model: Path, data: Path, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    (model / "chat_template.jinja").write_text(CHATML_TOOLS)
    own = {"kind": "tests.support.agents.tool_classes:Misbehaving", "kwargs": {"path": str(noted)}}
    tools = [own, {"kind": "tests.support.agents.tool_functions:add"}]
    agent = {"agent__loop": "tool_agent", "agent__tool_format": "hermes", **ROOMY}
    chosen = config(model, data, reward__function=SHARE, reward__trial_call=False, tools=tools, **agent)
    assert check_start(chosen, load_info(model)).warnings == []
    assert noted.read_text() == "closed\n"
    assert not any("megarl-tool" in thread.name for thread in threading.enumerate())
