"""Modules are found under the names that they had in 0.1.0."""

import importlib
import re
import sys

import pytest

from megarl.common.moved import MOVED

# The names of docs/reference/api.md, where it had them in 0.1.0.
PUBLIC = {
    "megarl.algorithms.contract": ["check_advantage", "check_loss"],
    "megarl.algorithms.group_rewards": ["Advantages", "GroupRewards"],
    "megarl.algorithms.token_loss": ["TokenInputs", "TokenLoss"],
    "megarl.common.errors": ["TrajectoryFull"],
    "megarl.common.options": ["Section"],
    "megarl.config.load": ["load_config"],
    "megarl.config.schema": ["Config"],
    "megarl.data.curriculum": ["TrainingProgress"],
    "megarl.environments.harness_loop": ["SampleFailed"],
    "megarl.queue.trajectory": ["Trajectory", "VersionSpan"],
    "megarl.rewards.math": ["math"],
    "megarl.rewards.types": ["RewardInput", "RewardResult", "Turn"],
    "megarl.rollout.agents.agent_loop": ["AgentContext", "AgentLoop"],
    "megarl.rollout.agents.finish": ["finish"],
    "megarl.rollout.requests": ["GenerateResult"],
    "megarl.tools.tool": ["Tool", "ToolAnswer"],
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_module_under_its_new_one(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old} is now {MOVED[old]}")):
        module = importlib.import_module(old)
    assert module is importlib.import_module(MOVED[old])
    assert module.__name__ == module.__spec__.name == MOVED[old]


@pytest.mark.parametrize(("old", "name"), [(old, name) for old, names in PUBLIC.items() for name in names])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_public_name_is_found_where_it_was(old: str, name: str) -> None:
    found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module("megarl"), name)


def test_other_names_are_not_found() -> None:
    missing = "megarl.rewards" + ".nothing"
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
        importlib.import_module(missing)
