"""Finds a model's files: `model.path` may be a Hugging Face directory or a Megatron checkpoint.

A Megatron checkpoint is a directory ROOT with `latest_checkpointed_iteration.txt` and step directories, `release/` or
`iter_0000005/`. Each step directory is complete: Megatron-Core's shards and, under `hf/`, config, tokenizer and
generation config. A path may name ROOT or a step directory. This module does not import torch.
"""

import json
from pathlib import Path
from typing import Any

from megarl.common.files import inside, refuse_outside_links
from megarl.common.values import GIB

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FILES = "hf"
FORMAT_FILE = "metadata.json"  # written by Megatron-Core after all shards
COMMON_FILE = "common.pt"  # Megatron-Core's unsharded state
SHARD_INDEX = ".metadata"  # the index of torch.distributed.checkpoint
HF_SHARD_BYTES = 5 * GIB  # largest weight file of an exported Hugging Face directory


def step_name(iteration: int | None) -> str:
    """Return the name of a step directory: `iter_0000005`, or `release` (None) for converted weights."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def megatron_step(path: Path | str) -> Path | None:
    """Return the step directory that `path` is or that its tracker file names; None if it is no Megatron checkpoint.

    Raises ValueError for an incomplete checkpoint (an unreadable tracker file, one that names a missing directory, or
    missing Megatron-Core files), and for a step directory that links out of ROOT.
    """
    path = Path(path)
    if (path / TRACKER).is_file():
        word = (path / TRACKER).read_text(errors="replace").strip()
        if word != RELEASE and not (word.isascii() and word.isdigit()):
            raise ValueError(f"{path / TRACKER} must hold a number or {RELEASE!r}, not {word[:40]!r}")
        step = inside(path, step_name(None if word == RELEASE else int(word)))
        if not step.is_dir():
            raise ValueError(f"{path / TRACKER} says {word}, but {step} does not exist")
    elif _is_step(path):
        step = path
    else:
        return None
    missing = [name for name in (FORMAT_FILE, SHARD_INDEX) if not (step / name).is_file()]
    if missing:
        raise ValueError(f"{step} is not a complete checkpoint: {' and '.join(missing)} missing")
    return step


def hf_files(path: Path | str) -> Path:
    """Return the directory with a model's `config.json`, tokenizer and generation config, for either format.

    Raises ValueError for a Megatron checkpoint without them, and for a file that links out of the directory.
    """
    step = megatron_step(path)
    if step is None:
        if Path(path).is_dir():
            refuse_outside_links(Path(path))
        return Path(path)
    refuse_outside_links(step)
    if not (step / HF_FILES / "config.json").is_file():
        raise ValueError(
            f"{step / HF_FILES / 'config.json'} not found: this Megatron checkpoint does not contain the model's "
            f"Hugging Face files; copy config.json and the tokenizer into {step / HF_FILES}"
        )
    refuse_outside_links(step / HF_FILES)
    return step / HF_FILES


def raw_config(path: Path | str) -> dict[str, Any]:
    """Return a model's parsed `config.json`; {} if there is none, or it is not a JSON object."""
    try:
        content = json.loads((hf_files(path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def not_for_engines(path: Path | str) -> str:
    """Return why vLLM cannot load the trainer's weights from this path; "" if it can. Raises like `hf_files`."""
    if megatron_step(path) is not None:
        return "is a Megatron checkpoint"
    return "holds quantised weights" if raw_config(path).get("quantization_config") else ""


def _is_step(path: Path) -> bool:
    if (path / SHARD_INDEX).is_file():
        return True
    try:
        return "sharded_backend" in json.loads((path / FORMAT_FILE).read_text())
    except (OSError, ValueError):
        return False
