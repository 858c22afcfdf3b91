"""Loads weights into chunks of any layout: of a Hugging Face directory, or of a Megatron checkpoint.

The latter with Megatron-Core's `dist_checkpointing.load`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

from megarl.checkpoint.format.keys import stored_tensors
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy, load_shards
from megarl.checkpoint.format.megatron_files import MegatronDirectory, check_keys, read_index
from megarl.checkpoint.format.sharding import model_sharded_state_dict
from megarl.common.values import MIB
from megarl.config.schema import Config
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.directory import HFDirectory, check_tensors, left_out_note
from megarl.models.hf.model_files import megatron_step
from megarl.models.hf.safetensors import read_records
from megarl.models.megatron.shards import Shard, local_shards, table

# The check of a run's weight files before anything starts: from their headers, no tensor is read.


def weight_problems(config: Config, info: ModelInfo) -> Iterator[str]:
    """Yield what is wrong with the weights that the trainer loads, as `key: what is wrong`.

    The files must be complete, and hold exactly the tensors of the family with the shapes that config.json implies.
    """
    loaded = [("model.path", config.model.path)] if config.model.load_weights else []
    if config.needs_reference and config.reference.path is not None:
        loaded.append(("reference.path", config.reference.path))
    for key, path in loaded:
        try:
            if megatron_step(path) is not None:
                MegatronDirectory(path)
                continue
            check_tensors(path, read_records(path), table(info), info)
        except (ValueError, OSError) as error:
            yield f"{key}: {error}"


logger = logging.getLogger(__name__)


def load_weights(chunks: Sequence[torch.nn.Module], info: ModelInfo, path: Path | str) -> int:
    """Fill this rank's chunks (wrapped or bare) from a Hugging Face directory or a Megatron checkpoint.

    Collective over the world for a Megatron checkpoint. Values are converted to each parameter's dtype. Returns the
    bytes of this rank's parameters or, for Hugging Face files, the bytes that it read. Raises ValueError listing
    missing, unexpected and misshapen tensors, before anything is written.
    """
    if megatron_step(path) is None:
        return load_hf_weights(chunks, info, path)
    return load_megatron_weights(chunks, info, path)


def load_hf_weights(chunks: Sequence[torch.nn.Module], info: ModelInfo, hf_dir: Path | str) -> int:
    """Fill this rank's chunks (wrapped or bare) from a Hugging Face directory; return the number of bytes read.

    Each rank reads only the slices of its own shards. A load writes every Megatron parameter and buffer exactly once,
    or nothing. Call it before the optimizer copies its master weights; see `load_weights`.
    """
    files = HFDirectory(hf_dir, info)
    shards = local_shards(chunks, info, files.entries)
    size = sum(_fill(shard, files) for shard in shards)
    if files.left_out:
        logger.warning("%s: %s", hf_dir, left_out_note(files.left_out, info))
    logger.info("%s: %d parameters, %.1f MiB read", hf_dir, len(shards), size / MIB)
    return size


def _fill(shard: Shard, files: HFDirectory) -> int:
    """Copy the shard's pieces into its parameter and return the bytes read. Padding rows become zeros."""
    axis = shard.entry.rule.axis or 0
    target, offset, size = shard.parameter.data, 0, 0
    for piece in shard.entry.pieces(shard.rank, shard.size):
        part = target.narrow(axis, offset, piece.size)
        if piece.source is None:
            part.zero_()
        else:
            name, rows = shard.entry.names[piece.source], (piece.start, piece.stop)
            values = files.rows(name, 0, files.shape(name)[0])[:, slice(*rows)] if axis else files.rows(name, *rows)
            part.copy_(values)
            size += values.nbytes
        offset += piece.size
    return size


def load_megatron_weights(chunks: Sequence[torch.nn.Module], info: ModelInfo, path: Path | str) -> int:
    """Fill this rank's chunks from a Megatron checkpoint, its root or a step directory; see `load_weights`."""
    step = megatron_step(path)
    if step is None:
        raise ValueError(f"{path} is not a Megatron checkpoint: it has neither a tracker file nor shards")
    stored = stored_tensors(table(info)).values()
    renamed = check_keys(step, read_index(step), [each for parts in stored for each in parts], info)
    state = model_sharded_state_dict(chunks, info)
    apply_factories(state)  # the halves are views of the parameters, so that nothing has to be merged after the load
    for each in nested_values(state):
        each.key = renamed.get(each.key, each.key)
    try:
        load_shards(state, step, MappedLoadStrategy())
    except CheckpointingException as error:
        raise ValueError(f"{step}: {error}") from error
    size = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    logger.info("%s: %.1f MiB of parameters filled", step, size / MIB)
    return size
