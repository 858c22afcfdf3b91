"""megarl: reinforcement learning of language models at scale. This module is its public API (docs/reference/api.md).

The names are loaded when they are first used. Those of `_LIGHT` import none of torch, Ray and vLLM, so tests of a
user's reward function or agent loop start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from megarl.common.moved import find_moved_modules

if TYPE_CHECKING:
    from megarl.algorithms.contract import check_advantage, check_loss
    from megarl.algorithms.interface.group_rewards import Advantages, GroupRewards
    from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
    from megarl.common.errors import TrajectoryFull
    from megarl.common.options import Section
    from megarl.config.loading.load import load_config
    from megarl.config.schema import Config
    from megarl.data.curriculum import TrainingProgress
    from megarl.environments.harness_loop import SampleFailed
    from megarl.queue.trajectory import Trajectory, VersionSpan
    from megarl.rewards.builtin.math import math
    from megarl.rewards.types import RewardInput, RewardResult, Turn
    from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
    from megarl.rollout.agents.tool_agent import finish
    from megarl.rollout.engine.messages import GenerateResult
    from megarl.tools.tool import Tool, ToolAnswer

__version__ = "0.1.0"

find_moved_modules()

__all__ = [
    "Advantages",
    "AgentContext",
    "AgentLoop",
    "Config",
    "GenerateResult",
    "GroupRewards",
    "RewardInput",
    "RewardResult",
    "SampleFailed",
    "Section",
    "TokenInputs",
    "TokenLoss",
    "Tool",
    "ToolAnswer",
    "TrainingProgress",
    "Trajectory",
    "TrajectoryFull",
    "Turn",
    "VersionSpan",
    "__version__",
    "check_advantage",
    "check_loss",
    "finish",
    "load_config",
    "math",
]

_LIGHT = {
    "AgentContext": "megarl.rollout.agents.agent_loop",
    "AgentLoop": "megarl.rollout.agents.agent_loop",
    "Config": "megarl.config.schema",
    "GenerateResult": "megarl.rollout.engine.messages",
    "RewardInput": "megarl.rewards.types",
    "RewardResult": "megarl.rewards.types",
    "SampleFailed": "megarl.environments.harness_loop",
    "Section": "megarl.common.options",
    "Tool": "megarl.tools.tool",
    "ToolAnswer": "megarl.tools.tool",
    "TrainingProgress": "megarl.data.curriculum",
    "Trajectory": "megarl.queue.trajectory",
    "TrajectoryFull": "megarl.common.errors",
    "Turn": "megarl.rewards.types",
    "VersionSpan": "megarl.queue.trajectory",
    "finish": "megarl.rollout.agents.tool_agent",
    "load_config": "megarl.config.loading.load",
    "math": "megarl.rewards.builtin.math",
}
_WITH_TORCH = {
    "Advantages": "megarl.algorithms.interface.group_rewards",
    "GroupRewards": "megarl.algorithms.interface.group_rewards",
    "TokenInputs": "megarl.algorithms.interface.token_loss",
    "TokenLoss": "megarl.algorithms.interface.token_loss",
    "check_advantage": "megarl.algorithms.contract",
    "check_loss": "megarl.algorithms.contract",
}


def __getattr__(name: str) -> object:
    module = _LIGHT.get(name) or _WITH_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    found: object = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
