"""Describes the content of a model directory in a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from megarl.checkpoint.convert.job import size
from megarl.checkpoint.format.hf_files import HFDirectory
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.checkpoint.format.shard_index import load_plain
from megarl.common.files import inside
from megarl.models.hf.load import left_out_note
from megarl.models.hf.model_files import COMMON_FILE


def describe(model: HFDirectory | MegatronDirectory) -> str:
    """Return a table of family, parameters, dtypes, layers, experts, shards and sizes, one fact per line."""
    info, names = model.info, model.names()
    counts: Counter[torch.dtype] = Counter()
    for name in names:
        counts[model.dtype(name)] += torch.Size(model.shape(name)).numel()
    experts = f", {sum(info.moe_layers)} of them with {info.num_experts} experts" if info.num_experts else ""
    files = [path for path in model.files() if path.suffix in (".safetensors", ".bin", ".distcp")]
    rows = [
        ("path", str(model.path)),
        ("format", _format(model)),
        ("family", f"{info.family} ({', '.join(info.raw.get('architectures') or [])})"),
        ("parameters", f"{sum(counts.values()):,}"),
        ("dtypes", ", ".join(f"{str(d).removeprefix('torch.')} {n:,}" for d, n in counts.most_common())),
        ("layers", f"{info.num_layers}{experts}"),
        ("hidden, vocabulary", f"{info.hidden:,}, {info.vocab_size:,}{' (tied)' if info.tied else ''}"),
        ("tensors", _tensors(model)),
        *([("left out", note.removeprefix("left out: "))] if (note := _left_out(model)) else []),
        ("weights", size(sum(dtype.itemsize * count for dtype, count in counts.items()))),
        ("shards", f"{len(files)}, {size(sum(path.stat().st_size for path in files))}"),
        *((f"  {path.name}", size(path.stat().st_size)) for path in files),
    ]
    width = max(len(title) for title, _ in rows)
    return "".join(f"{title:<{width}}  {value}\n" for title, value in rows)


def _format(model: HFDirectory | MegatronDirectory) -> str:
    if isinstance(model, HFDirectory):
        return "Hugging Face"
    metadata = content_metadata_of(model.step)
    scheme = f"scheme {metadata.get('megarl_scheme', 'unknown')}"
    return f"Megatron-Core torch_dist, {model.step.name}, {scheme}"


def content_metadata_of(step: Path) -> dict[str, object]:
    """Return the content metadata in `common.pt`, {} if there is none. Raises ValueError if it is not plain data."""
    path = inside(step, COMMON_FILE)
    try:
        common = load_plain(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except ValueError as error:  # a trainer's common state may hold other objects, whose code must not run here
        raise ValueError(f"{path} cannot be read as plain data: {error}") from error
    found: dict[str, object] = common.get("content_metadata") or {}
    return found


def _left_out(model: HFDirectory | MegatronDirectory) -> str:
    return left_out_note(model.left_out, model.info) if isinstance(model, HFDirectory) else ""


def _tensors(model: HFDirectory | MegatronDirectory) -> str:
    if isinstance(model, HFDirectory):
        return f"{len(model.names()):,}"
    keys = f"{len(model.names()):,} as Hugging Face tensors, {len(model.index):,} keys"
    own = sum(key.startswith("optimizer.") for key in model.index)
    return f"{keys}, {own:,} of them of the optimizer" if own else f"{keys}, none of an optimizer"
