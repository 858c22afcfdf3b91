"""Where a model's files are: `model.path` may be a Hugging Face directory or a Megatron checkpoint.

A Megatron checkpoint is `ROOT/latest_checkpointed_iteration.txt` beside `ROOT/release/` or `ROOT/iter_0000005/`; each
of these step directories is whole in itself: Megatron-Core's shards and, under `hf/`, config, tokenizer and generation
config. ROOT and a step directory are accepted alike. Nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_FILES = "hf"
FORMAT_FILE = "metadata.json"  # Megatron-Core's, written by it after all shards
SHARD_INDEX = ".metadata"  # torch.distributed.checkpoint's


def step_name(iteration: int | None) -> str:
    """Name of a step directory: `iter_0000005`, or `release` (None) for converted weights."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def megatron_step(path: Path | str) -> Path | None:
    """The step directory that `path` is or whose tracker file names; None if `path` is no Megatron checkpoint.

    Raises ValueError for one that is not whole: its tracker names a directory that is not there, its tracker file is
    unreadable, or the step directory lacks Megatron-Core's own files.
    """
    path = Path(path)
    if (path / TRACKER).is_file():
        word = (path / TRACKER).read_text(errors="replace").strip()
        if word != RELEASE and not (word.isascii() and word.isdigit()):
            raise ValueError(f"{path / TRACKER} must hold a number or {RELEASE!r}, not {word[:40]!r}")
        step = path / step_name(None if word == RELEASE else int(word))
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
    """Directory with `config.json`, tokenizer and generation config of a model path, be it Hugging Face or Megatron.

    Raises ValueError for a Megatron checkpoint that came without them.
    """
    step = megatron_step(path)
    if step is None:
        return Path(path)
    if not (step / HF_FILES / "config.json").is_file():
        raise ValueError(
            f"{step / HF_FILES / 'config.json'} not found: this Megatron checkpoint came without the model's Hugging "
            f"Face files; copy config.json and the tokenizer into {step / HF_FILES}"
        )
    return step / HF_FILES


def _is_step(path: Path) -> bool:
    if (path / SHARD_INDEX).is_file():
        return True
    try:
        return "sharded_backend" in json.loads((path / FORMAT_FILE).read_text())
    except (OSError, ValueError):
        return False
