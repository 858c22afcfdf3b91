"""Selects the checkpoint to resume from, and checks its config. Pure: the caller verifies the files."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoint.format.manifest import DamagedCheckpointError, FileEntry, Manifest
from megarl.checkpoint.save.directory import STATE_FILE, CheckpointDirectory
from megarl.common.values import leaves
from megarl.config.derived.datasets import train_sets
from megarl.config.schema import Config
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.model_files import hf_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


MOST_NAMED = 2  # differences of two models


class ResumeError(ValueError):
    """The run cannot resume from the checkpoint; the message has the reason and a fix."""


@dataclass(frozen=True)
class Candidate:
    """A complete checkpoint. `own`: it is in this run's directory and part of its history."""

    path: Path
    step: int
    own: bool


def candidates(directory: CheckpointDirectory, resume: str) -> list[Candidate]:
    """Return the checkpoints to try, in order: for `auto` newest first, for a path that one, for `never` none.

    Raises ResumeError if `resume` is a path without a checkpoint, or to one that this run has set aside.
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
            f"checkpoint.resume: {path} was set aside and does not belong to this run's history (see its name); to "
            f"resume from it, rename it to {directory.path(step).name}, after moving away any directory of that name"
        )
    return [Candidate(path, step, inside)]


def choose(
    found: list[Candidate],
    verify: Callable[[Path], list[str]],
    on_damaged: Callable[[Candidate, list[str]], None],
) -> Candidate | None:
    """Return the first candidate whose files match its manifest; None if there are no candidates.

    `verify` returns a checkpoint's problems. `on_damaged` is called with each damaged candidate before the chosen one.

    Raises ResumeError if all candidates are damaged: a new run would hide the loss. They are not renamed, so the next
    start raises the same error.
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
            f"every checkpoint to resume from is damaged: {'; '.join(all_problems[:4])}; restore one, or start a new "
            "run with checkpoint.resume=never"
        )
    return None


def identity(config: Config, info: ModelInfo) -> dict[str, Any]:
    """Return, as JSON, what must be equal in a checkpoint and in a run that resumes from it.

    Reads all prompt files for their digests.
    """
    files = hf_files(config.model.path)
    tokenizer = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        if (files / name).is_file():
            tokenizer.update(name.encode() + b"\0" + (files / name).read_bytes())
    digests = {each.name: FileEntry.of(each.path).blake3 for each in train_sets(config)}
    return {
        "model": {key: value for key, value in dataclasses.asdict(info).items() if value is not None},
        "tokenizer": tokenizer.hexdigest(),
        "prompts": digests if config.data.sets else digests[""],
    }


def contradictions(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return the reasons why this run cannot resume from a checkpoint with identity `saved`; [] if it can."""
    problems = _changed_model(saved["model"], present["model"])
    if saved["tokenizer"] != present["tokenizer"]:
        problems.append("model.path: its tokenizer files differ from those of the saved run")
    if saved["prompts"] != present["prompts"]:
        problems.append(_changed_prompts(saved["prompts"], present["prompts"]))
    return problems


def changed_order(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return the differences between two configs that would change the order of the prompts."""
    problems = []
    for section, name in (("run", "seed"), ("data", "shuffle")):
        before, now = saved.get(section, {}).get(name), present[section][name]
        if before is not None and before != now:
            text = json.dumps(before)
            problems.append(
                f"{section}.{name} is {json.dumps(now)}, the checkpoint has {text}: set {section}.{name}={text}"
            )
    return problems


def refusal(path: Path, problems: list[str]) -> str:
    """Return the message for a checkpoint that the run cannot resume from."""
    return (
        f"checkpoint.resume: {path} belongs to another run: {'; '.join(problems)}. Resume with the config of that run, "
        "start afresh with checkpoint.resume=never, or choose another run.dir"
    )


def resume_problems(config: Config, info: ModelInfo) -> list[str]:
    """Return why the run cannot resume from the checkpoint that `checkpoint.resume` selects; [] if it can or is new.

    The checkpoint's files are not verified: if they are damaged, the start takes an older one of the same run.
    """
    try:
        found = candidates(CheckpointDirectory(config.checkpoint_dir), config.checkpoint.resume)
    except ResumeError as error:
        return [str(error)]
    if not found:
        return []
    try:
        record = json.loads((found[0].path / STATE_FILE).read_text())
        saved, settings = record["identity"], record["config"]
    except (OSError, ValueError, KeyError):
        return []
    try:
        problems = contradictions(saved, identity(config, info))
    except OSError:  # missing files are reported elsewhere
        return []
    problems += changed_order(settings, config.model_dump(mode="json"))
    return [refusal(found[0].path, problems)] if problems else []


def _changed_model(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return one problem that names some differing sizes, or keys of config.json if no size differs."""
    differing = [
        f"{key} is {present.get(key)!r}, the checkpoint has {saved.get(key)!r}"
        for key in sorted((saved.keys() | present.keys()) - {"raw"})
        if _plain(saved.get(key)) != _plain(present.get(key))
    ]
    if not differing:
        before, now = saved.get("raw") or {}, present.get("raw") or {}
        differing = [
            f"its config.json has another {key}"
            for key in sorted(before.keys() | now.keys())
            if _plain(before.get(key)) != _plain(now.get(key))
        ]
    if not differing:
        return []
    more = f", and {len(differing) - MOST_NAMED} more differ" if len(differing) > MOST_NAMED else ""
    return [f"model.path: another model: {', '.join(differing[:MOST_NAMED])}{more}"]


def _changed_prompts(saved: str | dict[str, str], present: str | dict[str, str]) -> str:
    if isinstance(saved, str) and isinstance(present, str):
        return "data.path: its content differs from that of the saved run"
    if isinstance(saved, str) or isinstance(present, str):
        return "data: either this run or the saved one has data.sets, and the other data.path"
    if set(saved) != set(present):
        return f"data.sets: {sorted(present)}, the checkpoint has {sorted(saved)}"
    differing = [name for name in present if present[name] != saved[name]]
    return f"data.sets: the content of {', '.join(differing)} differs from that of the saved run"


def changes(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return the config keys whose values differ, as `key: old -> new`, sorted. A resume applies and reports them.

    Keys that the saved config lacks are left out: an older version wrote it.
    """
    before, after = ({key: _plain(value) for key, value in leaves(one, lists=False)} for one in (saved, present))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before)
        if before[key] != after.get(key) and not key.startswith("checkpoint.resume")
    ]


def _plain(value: object) -> object:
    """Convert tuples to lists, recursively, as in JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
