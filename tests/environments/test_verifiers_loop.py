"""The loop of a verifiers environment: its arguments, and the reward of the traces."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.schema.agent import AgentConfig
from megarl.environments.env_client import TraceSoFar
from megarl.environments.harness_loop import SampleFailed
from megarl.environments.verifiers_loop import Verifiers, client_problem, reward_of
from megarl.rollout.agents.loop_host import find_loop
from tests.support.checkout import ROOT

LOOP = "megarl.environments.verifiers_loop:Verifiers"


def trace(score: float, weight: float = 1.0, **values: Any) -> TraceSoFar:
    rewards = {"right": {"score": score, "weight": weight}, "unused": None}
    return TraceSoFar({"ok": True, "rewards": rewards, "metrics": {"turns": 2}} | values)


def test_the_reward_is_the_weighted_one_of_the_trace_and_the_mean_of_several() -> None:
    one = reward_of([trace(0.5, 2.0)])
    assert (one.score, one.components) == (1.0, {"right": 0.5, "turns": 2.0})
    both = reward_of([trace(1.0), trace(0.0, metrics={})])
    assert (both.score, both.components) == (0.5, {"right": 0.5, "turns": 1.0})


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([], "has made no trace"),
        ([trace(1.0, ok=False)], "it did not complete"),
        ([TraceSoFar({"ok": False}, errors=[{"type": "ToolError", "message": "no"}])], "ToolError: no"),
    ],
)
def test_traces_that_have_failed_fail_the_sample(traces: list[TraceSoFar], message: str) -> None:
    with pytest.raises(SampleFailed, match=message):
        reward_of(traces)


def test_the_environment_of_the_config(tmp_path: Path) -> None:
    """It is verifiers' own, with the taskset of the loop, and the server gets the variables that are named."""
    kwargs: dict[str, Any] = {"taskset": "mine", "python": sys.executable, "paths": [str(tmp_path)]}
    kwargs |= {"taskset_config": {"seed": 3}, "environment": {"agent": {"max_turns": 4}, "timeout": {"episode": 9.0}}}
    kwargs |= {"variables": {"NLTK_DATA": "/data"}}
    loop: Any = find_loop(AgentConfig(loop=LOOP, kwargs=kwargs))
    assert isinstance(loop, Verifiers)
    assert loop._spec.environment == {
        "agent": {"max_turns": 4},
        "timeout": {"episode": 9.0},
        "taskset": {"seed": 3, "id": "mine"},
    }
    assert loop._spec.variables == {"NLTK_DATA": "/data"}


def test_the_configs_of_the_page_have_arguments_that_there_are() -> None:
    page = (ROOT / "docs/rollout/environments.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    loops = [block["agent"]["kwargs"] for block in blocks if block.get("agent", {}).get("loop") == LOOP]
    rows = re.findall(r"^\| `(\w+)` \| .* \| `(\{.*\})` \|$", page, re.MULTILINE)
    loops += [{"taskset": name, **yaml.safe_load(kwargs)} for name, kwargs in rows]
    assert {loop["taskset"] for loop in loops} == {
        "gym_tasks",
        "gsm8k_tasks",
        "echo_v1",
        "counter_tool_v1",
        "textarena",
    }
    clients = set()
    for loop in loops:
        bound = inspect.signature(Verifiers).bind(**loop)
        bound.apply_defaults()
        given = {name: bound.arguments[name] for name in ("client", "renderer", "renderer_config")}
        assert client_problem(**given) is None
        clients.add(given["client"])
    assert clients == {"eval", "train"}


def test_what_the_client_of_verifiers_is_told(tmp_path: Path) -> None:
    """Its renderer is the mapping of the config, as it is there; the other client has none."""
    kwargs: dict[str, Any] = {"taskset": "mine", "python": sys.executable}
    made: Any = find_loop(AgentConfig(loop=LOOP, kwargs=kwargs))
    assert made._client == {"type": "eval"}
    for renderer in ({"name": "qwen3", "thinking_retention": "all"}, {"name": "default"}):
        train = {"client": "train", "renderer": "models/mine", "renderer_config": renderer}
        made = find_loop(AgentConfig(loop=LOOP, kwargs=kwargs | train))
        assert made._client == {"type": "train", "renderer_model_name": "models/mine", "renderer": renderer}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"python": "no/python"}, r"agent.kwargs.python: there is no no/python; run make setup-environments"),
        ({"paths": ["no/folder"]}, r"agent.kwargs.paths: there is no directory no/folder"),
        ({"task": 1}, r"cannot be made with agent.kwargs: .* 'task'"),
        ({"client": "trian"}, r"agent.kwargs.client: 'trian' is neither eval nor train"),
        (
            {"client": "train", "renderer": "models/mine"},
            r"agent.kwargs.renderer_config: for a model's directory client: train would tokenize the earlier turns .* "
            r"again, and refuse tools; name the renderer .* or \{name: default\} if each dialogue is one turn",
        ),
        ({"client": "train", "renderer": "models/mine", "renderer_config": {"name": "auto"}}, "renderer_config: for a"),
        ({"client": "train", "renderer": "models/mine", "renderer_config": {}}, "renderer_config: for a model's"),
        ({"client": "train", "renderer_config": {"name": "qwen3"}}, r"agent.kwargs.renderer: .* name the model's dir"),
        ({"renderer": "models/mine"}, r"agent.kwargs.renderer: client: eval makes no tokens; set client: train"),
        ({"renderer_config": {"name": "qwen3"}}, r"agent.kwargs.renderer: client: eval makes no tokens"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_at_the_start(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_loop(AgentConfig(loop=LOOP, kwargs={"taskset": "mine", "python": sys.executable, **kwargs}))
