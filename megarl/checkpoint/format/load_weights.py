"""Loads weights from a Hugging Face directory or a Megatron checkpoint into chunks of any layout."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megarl.checkpoint.format.megatron_files import MegatronDirectory, copy_pieces
from megarl.common.values import MIB
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.directory import HFDirectory, left_out_note
from megarl.models.hf.model_files import megatron_step
from megarl.models.megatron.shards import local_shards


def weight_problems(loaded: Mapping[str, Path], info: ModelInfo) -> Iterator[str]:
    """Yield the problems of the weights that the trainer will load, as `config key: problem`. Reads only headers.

    The files must be complete, and hold exactly the tensors of the family with the shapes that config.json implies.
    """
    for key, path in loaded.items():
        try:
            if megatron_step(path) is not None:
                MegatronDirectory(path)
                continue
            HFDirectory(path, info)
        except (ValueError, OSError) as error:
            yield f"{key}: {error}"


logger = logging.getLogger(__name__)


def load_weights(chunks: Sequence[torch.nn.Module], info: ModelInfo, path: Path | str) -> int:
    """Fill this rank's chunks (wrapped or bare) from a Hugging Face directory or a Megatron checkpoint.

    Each rank reads only the slices of its shards, and returns how many bytes. Values are converted to each parameter's
    dtype; every Megatron parameter and buffer is written exactly once. Call it before the optimizer copies its master
    weights. Raises ValueError listing missing, unexpected and misshapen tensors, before anything is written.
    """
    files = HFDirectory(path, info) if megatron_step(path) is None else MegatronDirectory(path, info)
    shards = local_shards(chunks, info, files.entries)
    size = 0
    for shard in shards:
        pieces = shard.entry.pieces(shard.rank, shard.size)
        size += copy_pieces(shard.parameter.data, shard.entry, pieces, files)
    if isinstance(files, HFDirectory) and files.left_out:
        logger.warning("%s: %s", path, left_out_note(files.left_out, info))
    logger.info("%s: %d parameters, %.1f MiB read", path, len(shards), size / MIB)
    return size
