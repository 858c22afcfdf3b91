"""Small configs for tests: a plain tree of values, and changes to it by dotted key or by section."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config


def with_changes(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `tree` with changes by dotted key, `__` for the dots (`{"trainer__gpus": 2}`)."""
    result: dict[str, Any] = copy.deepcopy(dict(tree))
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return result


def with_sections(tree: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of `tree` in which the fields of each of `sections` replace or join those of the section."""
    return {**tree, **{name: {**tree.get(name, {}), **fields} for name, fields in sections.items()}}


def write_problems(path: Path, count: int, offset: int = 0) -> Path:
    """`{"problem", "answer"}` lines: small additions."""
    rows = [{"problem": f"{i}+{i + 1}=?", "answer": str(2 * i + 1)} for i in range(offset, offset + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
    return with_changes(base, changes)


def config(model: Path | str, data_path: Path | str = "prompts.jsonl", **changes: Any) -> Config:
    return config_from_tree(tree(model, data_path, **changes))
