"""Which checkpoint a run goes on from, and whether its config may. Pure: verifying files is the caller's."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.format.manifest import DamagedCheckpointError, FileEntry, Manifest
from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.config.schema import Config
from megarl.models.info import ModelInfo
from megarl.models.source import hf_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


class ResumeError(ValueError):
    """The run cannot go on from the checkpoint; says why, and what to do."""


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint; `own`: it belongs to this run's directory, and its history is this run's."""

    path: Path
    step: int
    own: bool


def candidates(directory: CheckpointDirectory, resume: str) -> list[Candidate]:
    """Checkpoints to try, best first: the newest one before older ones; one for a path; none for `never`.

    Raises ResumeError if `resume` is a path without a checkpoint, or one that this run has set aside.
    """
    if resume == "never":
        return []
    if resume == "auto":
        return [Candidate(directory.path(step), step, True) for step in reversed(directory.steps())]
    path = Path(resume)
    own = CheckpointDirectory(path)
    if steps := own.steps():
        path = own.path(steps[-1])
    try:
        step = Manifest.read(path).step
    except DamagedCheckpointError as error:
        raise ResumeError(
            f"checkpoint.resume: {error}; give a directory such as RUN/checkpoints/iter_0000010"
        ) from None
    inside = path.resolve().parent == directory.root.resolve()
    if inside and path.resolve() != directory.path(step).resolve():
        raise ResumeError(
            f"checkpoint.resume: {path} is not of this run's history any more (see its name); to go on from it, move "
            f"what is now {directory.path(step).name} away and rename it to that"
        )
    return [Candidate(path, step, inside)]


def choose(
    found: list[Candidate],
    verify: Callable[[Path], list[str]],
    on_damaged: Callable[[Candidate, list[str]], None],
) -> Candidate | None:
    """The first candidate whose files are what its manifest says; None without candidates.

    `verify` returns what is wrong with one. `on_damaged` gets those before the one that is chosen. ResumeError if all
    are damaged: starting anew would hide the loss; they stay where they are, so that the next start says so too.
    """
    damaged: list[tuple[Candidate, list[str]]] = []
    for candidate in found:
        problems = verify(candidate.path)
        if not problems:
            for each in damaged:
                on_damaged(*each)
            return candidate
        damaged.append((candidate, problems))
    if damaged:
        all_problems = [problem for _, problems in damaged for problem in problems]
        raise ResumeError(
            f"no checkpoint to resume from is sound: {'; '.join(all_problems[:4])}; restore one, or start anew with "
            "checkpoint.resume=never"
        )
    return None


def identity(config: Config, info: ModelInfo) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must share; JSON. Reads the whole file of prompts."""
    files = hf_files(config.model.path)
    tokenizer = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (files / name).is_file():
            tokenizer.update(name.encode() + b"\0" + (files / name).read_bytes())
    return {
        "model": {key: value for key, value in dataclasses.asdict(info).items() if value is not None},
        "tokenizer": tokenizer.hexdigest(),
        "prompts": FileEntry.of(config.data.path).blake3,
    }


def contradictions(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a checkpoint with identity `saved` cannot be gone on with; empty if it can."""
    problems = [
        f"model: {key} is {now['model'].get(key)!r}, the checkpoint has {saved['model'].get(key)!r}"
        for key in sorted(saved["model"].keys() | now["model"].keys())
        if _plain(saved["model"].get(key)) != _plain(now["model"].get(key))
    ]
    if saved["tokenizer"] != now["tokenizer"]:
        problems.append("tokenizer: its files differ from those of the saved run")
    if saved["prompts"] != now["prompts"]:
        problems.append("data.path: its content differs from that of the saved run's")
    return problems


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Config keys whose values differ, as `key: old -> new`, sorted. What a resume takes over and says."""
    before, after = dict(_flatten(saved)), dict(_flatten(now))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith("checkpoint.resume")
    ]


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, _plain(tree)


def _plain(value: Any) -> Any:
    """Tuples as JSON has them."""
    return list(value) if isinstance(value, tuple) else value
