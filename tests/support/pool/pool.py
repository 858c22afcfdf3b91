"""A real rollout pool on a tiny model, for tests: supervisor, Ray head, one vLLM engine, controller and queue.

`start_pool(directory)` takes 30 to 60 s on two cores; share it by a session- or module-scoped fixture.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.support.pool.ray_token  # noqa: F401  # sets the environment before anything imports Ray
from megarl.cluster.client.pool_client import PoolClient
from megarl.cluster.pool.pool_process import SupervisorHandle, launch_supervisor
from megarl.config.schema import Config
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import with_sections, write_problems


def pool_config(directory: Path, model: Path | None = None, **sections: dict[str, Any]) -> Config:
    """An fp32 config on a tiny model and additions in `directory`; `sections` update whole sections' fields."""
    directory.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = make_tiny_model(directory / "model")
    fields: dict[str, dict[str, Any]] = {
        "run": {"name": "test", "dir": directory / "run", "steps": 100},
        "model": {"path": model},
        "trainer": {"precision": "fp32"},
        "batch": {"groups": 4, "samples_per_group": 4},
        "sampling": {"max_tokens": 16},
        "data": {"path": write_problems(directory / "train.jsonl", 32), "max_prompt_tokens": 64},
        "reward": {"function": "tests.support.rewards.reward_functions:digit_share"},
        "evaluation": {"sets": [{"name": "held_out", "path": write_problems(directory / "eval.jsonl", 8, 100)}]},
        "rollout": {"load_weights": True},  # there is no trainer whose first sync would bring them
        "timeouts": {"engine_start_s": 1200, "rpc_s": 120, "generate_s": 300},
    }
    return Config.model_validate(with_sections(fields, sections))


@dataclass
class TestPool:
    """A running pool; `close()` ends it."""

    __test__ = False
    config: Config
    handle: SupervisorHandle
    client: PoolClient
    close: Callable[[], None]


def start_pool(directory: Path, model: Path | None = None, agent_pid: int | None = None, **sections: Any) -> TestPool:
    """Start and connect; ends with this process at the latest."""
    config = pool_config(directory, model, **sections)
    handle = launch_supervisor(config.model_dump_json(), config.run_dir, agent_pid or os.getpid())
    client = PoolClient.connect(handle, config)
    return TestPool(config, handle, client, client.close)
