"""The work of one rank of a test world with converted checkpoints: save, load, export, convert."""

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

from megarl.checkpoint.format.keys import content_metadata
from megarl.checkpoint.format.load_weights import load_weights
from megarl.checkpoint.save.training_state import model_sharded_state_dict
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.export import HFExporter, save_hf
from megarl.models.hf.model_files import HF_FILES, hf_files
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.build_model import build_model, transformer_config
from megarl.models.megatron.layout import Layout
from tests.support.checkpoints.converter import run
from tests.support.ranks.models.layouts import make_layout, use_layout
from tests.support.ranks.training.policy import policy_under

Places = dict[str, list[tuple[Any, ...]]]


def build(model_dir: str, layout: Layout, precision: str = "fp32") -> tuple[ModelInfo, list[torch.nn.Module]]:
    """A model full of NaN: whatever a load forgets shows."""
    info = load_info(model_dir)
    chunks = build_model(info, transformer_config(info, layout, precision, initialize=False), layout)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    return info, chunks


def _places(state: Any) -> Places:
    """The places of each key's local pieces: (global shape, offset, local shape, dtype, is it written by this
    rank, may it be padded)."""
    apply_factories(state)
    places: Places = {}
    for each in nested_values(state):
        if isinstance(each, ShardedTensor):
            place = (each.global_shape, each.global_offset, each.local_shape, each.dtype)
            places.setdefault(each.key, []).append(
                (*place, is_main_replica(each.replica_id), each.allow_shape_mismatch)
            )
    return places


def both_schemes(model_dir: str, **sizes: Any) -> tuple[Places, Places]:
    """The places by megarl's scheme, and by Megatron-Core's own modules."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, chunks = build(model_dir, layout)
        ours = _places(model_sharded_state_dict(chunks, info))
        theirs: Places = {}
        for chunk in chunks:
            theirs |= _places(chunk.sharded_state_dict(metadata=content_metadata()))
        return ours, theirs


def _make(step: str, files: Path | None = None) -> None:
    """Make the directory of a checkpoint, with a copy of these Hugging Face files."""
    if torch.distributed.get_rank() == 0:
        Path(step).mkdir(parents=True)
        if files is not None:
            shutil.copytree(files, Path(step) / HF_FILES)
    torch.distributed.barrier()


def save(model_dir: str, step: str, precision: str = "fp32", **sizes: Any) -> None:
    """Load Hugging Face weights under the layout, save the model by Megatron-Core."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, chunks = build(model_dir, layout, precision)
        load_weights(chunks, info, model_dir)
        _make(step)
        dist_checkpointing.save(model_sharded_state_dict(chunks, info), step, content_metadata=content_metadata())


def save_by_megatron(model_dir: str, step: str, **sizes: Any) -> None:
    """Save with the keys that Megatron-Core's own modules give, extra states included."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, (chunk,) = build(model_dir, layout)
        load_weights([chunk], info, model_dir)
        _make(step, Path(model_dir))
        state = chunk.sharded_state_dict(metadata=content_metadata())
        dist_checkpointing.save(state, step, content_metadata=content_metadata())


def load_and_export(
    checkpoint: str,
    model_dir: str,
    out: str,
    precision: str = "fp32",
    dtype: str = "float32",
    shard_bytes: int = 2**30,
    **sizes: Any,
) -> None:
    """Load a checkpoint under the layout, export the model as the weight sync's stream gives it."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, chunks = build(model_dir, layout, precision)
        load_weights(chunks, info, checkpoint)
        save_hf(HFExporter(chunks, info, getattr(torch, dtype)), model_dir, Path(out), shard_bytes)


def load_save_and_export(checkpoint: str, step: str, out: str, **sizes: Any) -> None:
    """Load a checkpoint under the layout, save it by Megatron-Core, and export it by the weight sync's stream."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, chunks = build(checkpoint, layout)
        load_weights(chunks, info, checkpoint)
        _make(step, hf_files(checkpoint))
        dist_checkpointing.save(model_sharded_state_dict(chunks, info), step, content_metadata=content_metadata())
        save_hf(HFExporter(chunks, info, torch.float32), checkpoint, Path(out))


def policy_digest(model_dir: str, layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Every parameter of this rank's policy and reference model, by digest."""
    with policy_under(Path(model_dir), layout) as policy:
        assert policy.reference is not None
        chunks = [*policy.module_chunks, *policy.reference.chunks]
        return [
            (name, hashlib.sha256(parameter.detach().view(torch.uint8).numpy().tobytes()).hexdigest())
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
        ]


def convert_on_ranks(arguments: list[str], attempt: str, failing_rank: int | None = None) -> tuple[int, str, str]:
    """Do what `torchrun convert.py ...` does on this rank; `attempt` tells runs in one world apart."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "its disk")

    broken = mock.patch("megarl.checkpoint.convert.target.Output.finish_unit", fail)
    with broken if failing_rank == torch.distributed.get_rank() else contextlib.nullcontext():
        with mock.patch("megarl.checkpoint.convert.cli._EXIT_DELAY_S", 0.0):
            return run(*arguments, TORCHELASTIC_RESTART_COUNT=attempt)
