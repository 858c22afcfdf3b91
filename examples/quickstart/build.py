"""Makes the quickstart's directory atomically and only once; the same seed gives the same bytes.

It holds train.jsonl, heldout.jsonl and warm_start.jsonl with their pictures, model/ (checkpoint, tokenizer, chat
template, generation config, image processor settings), and assets.json, which lists the files with their digests. A
later call checks it to see that the directory is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from examples.quickstart.additions_task import AdditionsTask
from examples.quickstart.demonstrations import ProblemRow, StarterTask, read_problems
from examples.quickstart.seeing_model import build_seeing_model, save_image_processor
from examples.quickstart.tokenizer import train_tokenizer
from examples.quickstart.warm_start import WarmStart, build_model, warm_start

logger = logging.getLogger(__name__)

MANIFEST = "assets.json"


def build_assets(out: Path, seed: int = 0, size: WarmStart | None = None, task: StarterTask | None = None) -> bool:
    """Make all assets of a task in `out` unless they exist; return True if they were made.

    The default task is additions.

    Raises ValueError if `out` holds files that this function did not make.
    """
    size, task = size or WarmStart(), task or AdditionsTask()
    wanted = {"task": task.name, "recipe": task.recipe, "seed": seed, "warm_start": asdict(size)}
    manifest = _read_manifest(out)
    if manifest is not None and _complete(out, manifest) and wanted.items() <= manifest.items():
        logger.info("%s is complete (seed %d), nothing to do", out, seed)
        return False
    if manifest is None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and was not made by examples.quickstart: choose another --out")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        facts = _make(partial, seed, size, task)
        files = {path.relative_to(partial).as_posix(): _sha256(path) for path in _files(partial)}
        _write(partial / MANIFEST, json.dumps({**wanted, **facts, "files": files}, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _make(out: Path, seed: int, size: WarmStart, task: StarterTask) -> dict[str, Any]:
    """Write data, tokenizer and checkpoint to `out`; return the numbers for the manifest."""
    data = task.data(seed)
    for name, rows in data.rows().items():
        _write_jsonl(out / f"{name}.jsonl", rows)
    for name, png in data.pictures.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(png)
    problems = read_problems(out)
    task.check(problems)

    tokenizer = train_tokenizer(task.corpus(data), task.vocabulary, task.chat_template)
    model = (build_seeing_model if data.pictures else build_model)(tokenizer, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("warm start: %d parameters, %d problems", parameters, len(problems["warm_start"]))
    loss = warm_start(model, tokenizer, task.demonstrations(tokenizer, data), seed, size)
    model.save_pretrained(out / "model", safe_serialization=True)
    tokenizer.save_pretrained(out / "model")
    if data.pictures:
        save_image_processor(out / "model")
    counts = {name: len(found) for name, found in problems.items()}
    return {"problems": counts, "parameters": parameters, "vocabulary": len(tokenizer), "loss": loss}


def _write_jsonl(path: Path, rows: Iterable[ProblemRow]) -> None:
    _write(path, "".join(json.dumps(dict(row)) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_manifest(out: Path) -> dict[str, Any] | None:
    path = out / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def _complete(out: Path, manifest: dict[str, Any]) -> bool:
    """Return whether every file in the manifest exists with its digest."""
    return all((out / name).is_file() and _sha256(out / name) == digest for name, digest in manifest["files"].items())
