"""A config whose reward runs programs is refused where it could not run them."""

from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks import agent
from megarl.config.checks.agent import sandbox_problems
from megarl.config.checks.sections import check
from tests.support.trainer.configs import config


def problems(reward: dict[str, Any], *, here: bool = True) -> list[str]:
    return list(sandbox_problems(config("model", reward=reward), here=here))


def test_a_reward_that_runs_no_programs_needs_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "sandbox_problem", lambda: "no bwrap")
    assert problems({"function": "math"}) == []
    assert problems({"function": "code"}, here=False) == []
    (problem,) = problems({"function": "code"})
    assert problem.startswith("reward.function: code runs programs in a sandbox") and problem.endswith("no bwrap")


@pytest.mark.parametrize(
    ("reward", "reported"),
    [
        ({"kwargs": {"colour": 1}}, "colour"),
        ({"kwargs": {"timeout_s": -1}}, "timeout_s"),
        ({"kwargs": {"packages": ["/nowhere/at/all"]}}, "packages"),
        ({"kwargs": {"timeout_s": 10.0}}, "not below reward.timeout_s=10"),
        ({"memory_gib": 0.25}, "more than reward.memory_gib=0.25"),
    ],
)
def test_settings_that_cannot_work(reward: dict[str, Any], reported: str) -> None:
    (problem,) = problems({"function": "code", **reward}, here=False)
    assert problem.startswith("reward.kwargs: ") and reported in problem


def test_tools_that_need_a_sandbox_are_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"kind": "json:calculator"}, {"kind": "python"}]
    chosen = config("model", agent={"loop": "tool_agent"}, tools=tools)
    monkeypatch.setattr(agent, "sandbox_problem", lambda: "no bubblewrap; install it")
    (problem,) = sandbox_problems(chosen, here=True)
    assert problem.startswith("tools.1: python runs programs in a sandbox") and problem.endswith("install it")
    assert list(sandbox_problems(chosen, here=False)) == []
    monkeypatch.setattr(agent, "sandbox_problem", lambda: None)
    assert list(sandbox_problems(chosen, here=True)) == []


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"reward": {"function": "code"}}, "reward.function: code runs programs in a sandbox"),
        ({"agent": {"loop": "tool_agent"}, "tools": [{"kind": "python"}]}, "tools.0: python runs programs"),
    ],
)
def test_the_check_of_a_whole_config_refuses_them(
    models: dict[str, Path], data: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reported: str
) -> None:
    monkeypatch.setattr(agent, "sandbox_problem", lambda: "no bubblewrap; install it")
    with pytest.raises(ConfigError) as refused:
        check(config(models["qwen3"], data, **changes), device="cpu")
    (problem,) = [each for each in refused.value.problems if "sandbox" in each]
    assert problem.startswith(reported) and problem.endswith("and this machine has none: no bubblewrap; install it")
