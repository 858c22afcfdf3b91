"""The loop that a config names, and the messages for one that cannot be had."""

import pytest

from megarl.config.schema.agent import AgentConfig
from megarl.rollout.agents.loop_host import SingleTurn, find_loop
from megarl.rollout.agents.tool_agent import ToolAgent

EXAMPLE = "examples.rl.agents.second_thoughts:SecondThoughts"


def test_loops_are_found_by_name_and_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(find_loop(AgentConfig()), SingleTurn)
    assert isinstance(find_loop(AgentConfig(loop="tool_agent")), ToolAgent)
    monkeypatch.setenv("A_TOOL", "digits")
    found = find_loop(AgentConfig(loop=EXAMPLE, kwargs={"tool": {"env": "A_TOOL"}, "first_tokens": 4}))
    assert vars(found) == {"tool": "digits", "first_tokens": 4}


@pytest.mark.parametrize(
    ("loop", "kwargs", "message"),
    [
        ("no_such_module:Loop", {}, "cannot be imported: ModuleNotFoundError"),
        (EXAMPLE.replace("SecondThoughts", "Third"), {}, "cannot be imported: AttributeError"),
        ("json:loads", {}, "must be a class with a method `async def run"),
        ("json:JSONEncoder", {}, "must be a class with a method `async def run"),
        (EXAMPLE, {"tol": "x"}, "cannot be made with agent.kwargs: .*'tol'"),
    ],
)
def test_a_loop_that_cannot_be_had_is_reported(loop: str, kwargs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_loop(AgentConfig(loop=loop, kwargs=kwargs))
