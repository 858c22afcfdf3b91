"""Makes the quickstart's directory atomically and only once; the same seed gives the same bytes.

It holds train.jsonl, heldout.jsonl and warm_start.jsonl, model/ (checkpoint, tokenizer, chat template, generation
config), and assets.json, which lists the files with their digests; by it a later call finds the directory complete.
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

from megarl.quickstart.problems import Addition, Splits, check_disjoint, make_splits, solutions
from megarl.quickstart.tokenizer import train_tokenizer
from megarl.quickstart.warm_start import WarmStart, build_model, warm_start

logger = logging.getLogger(__name__)

RECIPE = 1  # increase it if the same seed makes other assets: complete directories are then made again
MANIFEST = "assets.json"


def build_assets(out: Path, seed: int = 0, size: WarmStart | None = None) -> bool:
    """Make all assets in `out`, unless they are already there; return True if they were made.

    Raises ValueError if `out` holds files that this function did not make.
    """
    size = size or WarmStart()
    wanted = {"recipe": RECIPE, "seed": seed, "warm_start": asdict(size)}
    manifest = _read_manifest(out)
    if manifest is not None and _complete(out, manifest) and all(manifest[key] == wanted[key] for key in wanted):
        logger.info("%s is complete (seed %d), nothing to do", out, seed)
        return False
    if manifest is None and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and was not made by megarl.quickstart: choose another --out")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        facts = _make(partial, seed, size)
        files = {path.relative_to(partial).as_posix(): _sha256(path) for path in _files(partial)}
        _write(partial / MANIFEST, json.dumps({**wanted, **facts, "files": files}, indent=2) + "\n")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def _make(out: Path, seed: int, size: WarmStart) -> dict[str, Any]:
    """Write data, tokenizer and checkpoint to `out`; return the numbers for the manifest."""
    splits = make_splits(seed)
    _write_jsonl(out / "train.jsonl", (_row(item) for item in splits.train))
    _write_jsonl(out / "heldout.jsonl", (_row(item) for item in splits.heldout))
    rows = ({**_row(item), "solution": text} for item in splits.warm_start for text in solutions(item))
    _write_jsonl(out / "warm_start.jsonl", rows)
    check_written(out)

    tokenizer = train_tokenizer(_tokenizer_corpus(splits))
    model = build_model(tokenizer, seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("warm start: %d parameters, %d problems", parameters, len(splits.warm_start))
    loss = warm_start(model, tokenizer, splits.warm_start, seed, size)
    model.save_pretrained(out / "model", safe_serialization=True)
    tokenizer.save_pretrained(out / "model")
    counts = {name: len(getattr(splits, name)) for name in ("warm_start", "train", "heldout")}
    return {"problems": counts, "parameters": parameters, "vocabulary": len(tokenizer), "loss": loss}


def check_written(out: Path) -> None:
    """Read the three data files back; raises AssertionError unless their problems are disjoint."""
    sets = {}
    for name in ("warm_start", "train", "heldout"):
        texts = [json.loads(line)["problem"] for line in (out / f"{name}.jsonl").read_text().splitlines()]
        sets[name] = [_parse(text) for text in dict.fromkeys(texts)]
    check_disjoint(Splits(**sets))


def _parse(problem: str) -> Addition:
    first, second = problem.removeprefix("What is ").removesuffix("?").split(" + ")
    return Addition(int(first), int(second))


def _row(item: Addition) -> dict[str, str]:
    return {"problem": item.problem, "answer": item.answer}


def _tokenizer_corpus(splits: Splits) -> Iterable[str]:
    """Yield the texts of the warm-start set, with the roles of the chat template."""
    for item in splits.warm_start:
        yield f"user\n{item.problem}"
        yield from (f"assistant\n{text}" for text in solutions(item))
        yield from ("assistant\n", solutions(item)[0])


def _write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


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
    """Tell whether every file of the manifest is there with its digest."""
    return all((out / name).is_file() and _sha256(out / name) == digest for name, digest in manifest["files"].items())
