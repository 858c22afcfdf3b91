"""Small configs for tests: a plain tree of values, and changes to it by dotted key."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from megarl.config.load import config_from_tree
from megarl.config.schema import Config


def tree(model: Path | str, data_path: Path | str = "prompts.jsonl", **changes: Any) -> dict[str, Any]:
    """A complete config; `changes` are keys with `__` for the dots (`trainer__gpus=2`)."""
    base: dict[str, Any] = {
        "run": {"name": "test", "steps": 4},
        "model": {"path": str(model)},
        "trainer": {"gpus": 1, "precision": "fp32", "micro_batch_tokens": 256},
        "batch": {"groups": 4, "samples_per_group": 4},
        "sampling": {"max_tokens": 32},
        "data": {"path": str(data_path), "max_prompt_tokens": 32},
    }
    result = copy.deepcopy(base)
    for key, value in changes.items():
        section = result
        *parents, leaf = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return result


def config(model: Path | str, data_path: Path | str = "prompts.jsonl", **changes: Any) -> Config:
    return config_from_tree(tree(model, data_path, **changes))
