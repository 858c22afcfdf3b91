"""Loads Hugging Face weights into Megatron chunks: each rank reads only the slices of its own shards.

A load writes every Megatron parameter and buffer exactly once, or nothing: if the files do not hold exactly the tensors
that the family's table names, with its shapes, it raises an error that lists the differences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.common.values import MIB
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.families import FAMILIES
from megarl.models.hf.safetensors import DTYPES, SafetensorsDirectory, TensorRecords
from megarl.models.megatron.shards import EMBEDDING, Shard, local_shards, table

logger = logging.getLogger(__name__)
LISTED = 20  # names that an error message lists at most


def load_hf_weights(chunks: Sequence[torch.nn.Module], info: ModelInfo, hf_dir: Path | str) -> int:
    """Fill this rank's chunks (wrapped or bare) from a Hugging Face directory; return the number of bytes read.

    Values are converted to each parameter's dtype. Call it before the optimizer copies its master weights.
    Raises ValueError listing missing, unexpected and misshapen tensors, before anything is written.
    """
    entries = table(info)
    with SafetensorsDirectory(hf_dir) as files:
        check_tensors(files, entries, info)
        shards = local_shards(chunks, info, entries)
        size = sum(_fill(shard, files) for shard in shards)
        left_out = [name for name in files.records if is_left_out(name, info)]
        if left_out:
            logger.warning("%s: %s", hf_dir, left_out_note(left_out, info))
        if info.tied and "lm_head.weight" in files.records:
            _check_redundant_head(shards, files)
    logger.info("%s: %d parameters, %.1f MiB read", hf_dir, len(shards), size / MIB)
    return size


def check_tensors(files: TensorRecords, entries: dict[str, Entry], info: ModelInfo) -> None:
    """Check that the files hold exactly the table's tensors, in floating point.

    Raises ValueError listing the missing, unexpected and misshapen tensors.
    """
    expected = {
        name: shape for entry in entries.values() for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    tolerated = _redundant_names(info) | {name for name in files.records if is_left_out(name, info)}
    missing = [name for name in expected if name not in files.records]
    extra = sorted(name for name in files.records if name not in expected and name not in tolerated)
    wrong = []
    for name, shape in expected.items():
        record = files.records.get(name)
        if record is None:
            continue
        dtype = DTYPES.get(record.dtype)
        if record.shape != shape:
            wrong.append(f"{name} in {record.file}: shape {list(record.shape)}, config.json implies {list(shape)}")
        elif dtype is None or not dtype.is_floating_point:
            wrong.append(f"{name} in {record.file}: dtype {record.dtype} is not a supported floating-point type")
    problems = [
        *listed("missing tensors", missing),
        *listed("tensors that the family does not have", extra),
        *listed("misshapen tensors", wrong),
    ]
    if problems:
        raise ValueError(f"{files.directory} does not match its config.json ({info.family}):\n" + "\n".join(problems))


def is_left_out(name: str, info: ModelInfo) -> bool:
    """Tell whether a Hugging Face tensor belongs to a part that is neither trained nor exported (`Family.left_out`)."""
    return name.startswith(FAMILIES[info.family].left_out(info))


def left_out_note(names: Sequence[str], info: ModelInfo) -> str:
    """Return one line for the user about the left-out tensors `names`, or "" if there are none."""
    if not names:
        return ""
    layers = [prefix for prefix in FAMILIES[info.family].left_out(info) if any(n.startswith(prefix) for n in names)]
    return (
        f"left out: {len(names)} tensors of the multi-token prediction layer{'s' * (len(layers) > 1)} "
        f"{', '.join(f'{layer}*' for layer in layers)}, which {'are' if len(layers) > 1 else 'is'} not trained"
    )


def _redundant_names(info: ModelInfo) -> set[str]:
    names = {
        template.format(layer=layer) for template in FAMILIES[info.family].redundant for layer in range(info.num_layers)
    }
    return names | ({"lm_head.weight"} if info.tied else set())


def _fill(shard: Shard, files: SafetensorsDirectory) -> int:
    """Copy the shard's pieces into its parameter and return the bytes read. Padding rows become zeros."""
    axis = shard.entry.rule.axis or 0
    target, offset, size = shard.parameter.data, 0, 0
    for piece in shard.entry.pieces(shard.rank, shard.size):
        part = target.narrow(axis, offset, piece.size)
        if piece.source is None:
            part.zero_()
        else:
            values = files.read(shard.entry.names[piece.source], axis, piece.start, piece.stop)
            part.copy_(values)
            size += values.nbytes
        offset += piece.size
    return size


def _check_redundant_head(shards: list[Shard], files: SafetensorsDirectory) -> None:
    """Check that `lm_head.weight`, which a tied model's files may contain, equals the embedding.

    Only the embedding is loaded. Raises ValueError if they differ.
    """
    for shard in shards:
        if shard.entry.megatron != EMBEDDING:
            continue
        for piece in shard.entry.pieces(shard.rank, shard.size):
            name = shard.entry.names[0]
            rows = (0, piece.start, piece.stop)
            if piece.source is not None and not torch.equal(
                files.read(name, *rows), files.read("lm_head.weight", *rows)
            ):
                raise ValueError(
                    f"{files.directory}: the embeddings are tied, but lm_head.weight differs from {name}; "
                    "set tie_word_embeddings to false or remove lm_head.weight"
                )


def listed(title: str, names: list[str]) -> list[str]:
    """Return lines of an error message: the number of `names` with `title`, then the first names; [] without names."""
    if not names:
        return []
    more = [f"    … and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"  {len(names)} {title}:", *(f"    {name}" for name in names[:LISTED]), *more]
