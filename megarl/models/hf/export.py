"""Exports Megatron shards as Hugging Face tensors, one at a time, each on the rank that owns it.

The manifest is equal on every rank, in layer order. `stream` follows it; `gathers` brings any rows to their owner. Each
rank takes part only in the gathers of its shards. In addition to the shards, `stream` holds at most one Hugging Face
tensor in memory, and the peers' blocks of it that are not whole rows.

Tensors may have any shape.
"""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.common.files import inside
from megarl.common.trust.object_collectives import Codec, all_gather, codec_of
from megarl.common.values import MIB
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.hf.fused import FusedTensor, FusedWriter, fused_tensors, joined
from megarl.models.hf.gather import Gather, GatherRequest, GlooWaiter, Rows, TensorPart, build_gathers
from megarl.models.hf.gather_pairs import connect_pairs, pairs_of
from megarl.models.hf.model_files import HF_SHARD_BYTES, hf_files
from megarl.models.hf.read_config import family_of
from megarl.models.hf.safetensors import SafetensorsWriter, TensorHeader, write_index
from megarl.models.megatron.shards import Shard, local_shards, table

logger = logging.getLogger(__name__)
SHARED = -1  # the owner of a fused tensor: all owners of its experts write it
_NAMES: Codec[list[str]] = codec_of(list[str])
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")


@dataclass(frozen=True)
class ExportedTensor(TensorHeader):
    """A Hugging Face tensor of an export; `owner` is the global trainer rank that receives the full tensor."""

    owner: int


class HFExporter:
    """Streams the model in `chunks` (wrapped or bare) in `dtype`, or fp32 if a rule says so. Build it on all ranks."""

    def __init__(self, chunks: Sequence[torch.nn.Module], info: ModelInfo, dtype: torch.dtype) -> None:
        self.info = info
        self.dtype = dtype
        self._entries = table(info)
        self._shards = {
            shard.name: shard for shard in local_shards(chunks, info, self._entries) if not shard.is_tied_copy
        }
        self._manifest: list[ExportedTensor] | None = None
        self._held: dict[int, TensorPart] | None = None
        self._waiter = GlooWaiter()
        self._connected = False

    def manifest(self) -> list[ExportedTensor]:
        """Return all tensors of the model in layer order, equal on all ranks. The first call is collective.

        Raises RuntimeError if a Megatron parameter has no owner, or two.
        """
        if self._manifest is None:
            owners = self._owners()
            self._manifest = [
                ExportedTensor(name, shape, self._dtype_of(entry), owners[entry.megatron])
                for entry in self._entries.values()
                for name, shape in zip(entry.names, entry.shapes, strict=True)
            ]
        return self._manifest

    def gathers(self, requests: Sequence[GatherRequest], device: torch.device) -> list[Gather | None]:
        """Return this rank's part in each request's gather; None where it has none.

        Requests name tensors by their number in the manifest. `device`: the targets'. A request's owner must own all
        its tensors. All ranks with a part must run the gathers in the order of the list.
        """
        return build_gathers(self._parts(), requests, device, self._waiter)

    def connect(self, timeout_s: float) -> None:
        """Connect this rank to its peers in gathers. All ranks must call it.

        Later calls do nothing, and gloo needs none. Raises PeerTimeout if a peer does not join within `timeout_s`
        seconds.
        """
        if self._connected:
            return
        parts = self._parts()
        device = next((part.shard.parameter.device for part in parts.values()), torch.device("cpu"))
        rank = torch.distributed.get_rank()
        connect_pairs(pairs_of(parts.values(), rank), rank, device, timeout_s)
        self._connected = True

    def stream(self) -> Iterator[tuple[ExportedTensor, torch.Tensor | None]]:
        """Yield (manifest entry, the full tensor on its owner or None elsewhere) for this rank's shards.

        The ranks of a tensor-parallel group must advance together: each step is a gather, bounded by the group's
        timeout. Tensors may share memory with the parameters: read them before the next step, and never write to them.
        Only ranks with data-parallel rank 0 yield anything.
        """
        manifest = self.manifest()
        for number, part in self._parts().items():
            item = manifest[number]
            if part.group is None:
                yield item, part.whole() if part.owned else None
                continue
            device = part.shard.parameter.device
            full = torch.empty(item.shape, dtype=item.dtype, device=device) if part.owned else None
            request = GatherRequest((Rows(number, 0, item.shape[0]),), () if full is None else (full,))
            (gather,) = self.gathers([request], device)
            if gather is not None:
                gather.copy()
                gather.post()
                gather.done(None)
                gather.finish()
            yield item, full

    def _parts(self) -> dict[int, TensorPart]:
        """Return this rank's part of each Hugging Face tensor by number in the manifest; {} if it does not send."""
        if self._held is None:
            self._held = {}
            number = 0
            for entry in self._entries.values():
                shard = self._shards.get(entry.megatron)
                if shard is not None and _is_sender(shard):
                    cut = entry.rule.axis is not None and shard.size > 1
                    group = _group(shard) if cut else None
                    for source in range(len(entry.names)):
                        self._held[number + source] = TensorPart(shard, source, self._dtype_of(entry), group)
                number += len(entry.names)
        return self._held

    def _dtype_of(self, entry: Entry) -> torch.dtype:
        return torch.float32 if entry.rule.stays_fp32 else self.dtype

    def _owners(self) -> dict[str, int]:
        """Return the global owner rank of each Megatron parameter, agreed on by all ranks."""
        mine = [name for name, shard in self._shards.items() if _is_sender(shard) and shard.rank == 0]
        owners: dict[str, int] = {}
        for rank, names in enumerate(all_gather(mine, _NAMES)):
            for name in names:
                if name in owners:
                    raise RuntimeError(f"{name} has two owners: ranks {owners[name]} and {rank}")
                owners[name] = rank
        missing = [name for name in self._entries if name not in owners]
        if missing:
            raise RuntimeError(f"no rank holds {missing[:5]} ({len(missing)} Megatron parameters)")
        return owners


def _is_sender(shard: Shard) -> bool:
    from megatron.core import parallel_state

    if shard.entry.expert is not None:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _group(shard: Shard) -> torch.distributed.ProcessGroup:
    from megatron.core import parallel_state

    if shard.entry.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def save_hf(
    exporter: HFExporter,
    hf_source_dir: Path | str,
    out_dir: Path | str,
    shard_bytes: int = HF_SHARD_BYTES,
    *,
    overwrite: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
) -> None:
    """Write a Hugging Face directory: safetensors, index, and all files of the source except its weights.

    Collective over all ranks; `out_dir` must be on a shared file system. Each owner writes its files with one tensor in
    memory at a time; a rename publishes the complete directory. `group`: all ranks, for the barriers, with a timeout
    long enough for a slow disk; None = the default group. Raises ValueError if `out_dir` exists and `overwrite` is
    false.
    """
    out, rank = Path(out_dir), torch.distributed.get_rank()
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; choose another directory or remove it")
    partial = out.with_name(f".{out.name}.partial")
    fused = fused_tensors(exporter.info, table(exporter.info))
    files = plan_files(_as_published(exporter.manifest(), fused), shard_bytes)
    shared = FusedWriter(partial, {name: tensors for name, tensors in files if tensors[0].owner == SHARED}, fused)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        copy_side_files(hf_files(hf_source_dir), partial, exporter.dtype)
        shared.create()
    torch.distributed.barrier(group)
    _write_own_files(exporter, partial, files, rank, shared)
    torch.distributed.barrier(group)
    if rank == 0:
        if len(files) > 1:
            write_index(partial, files)
        if out.exists():
            old = out.with_name(f".{out.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(out, old)
            os.replace(partial, out)
            shutil.rmtree(old)
        else:
            os.replace(partial, out)
        logger.info("%s: %d files, %.1f MiB", out, len(files), sum(t.nbytes for t in exporter.manifest()) / MIB)
    torch.distributed.barrier(group)


def _as_published(manifest: Sequence[ExportedTensor], fused: Mapping[str, FusedTensor]) -> list[ExportedTensor]:
    """Return the tensors of the files: fused ones, whose experts have several owners, in place of matrices."""
    by_name = {tensor.name: tensor for tensor in manifest}
    return [
        ExportedTensor(name, fused[name].shape, by_name[fused[name].parts[0][0]].dtype, SHARED)
        if name in fused
        else by_name[name]
        for name in joined([tensor.name for tensor in manifest], fused)
    ]


def plan_files(manifest: Sequence[ExportedTensor], shard_bytes: int) -> list[tuple[str, list[ExportedTensor]]]:
    """Return (file name, tensors) pairs: each owner's tensors, in order, in files of at most `shard_bytes`.

    A larger tensor gets a file to itself.
    """
    groups: list[list[ExportedTensor]] = []
    open_group: dict[int, list[ExportedTensor]] = {}
    size: dict[int, int] = {}  # bytes of each owner's open group; a running sum, because there are up to 20,000 tensors
    for tensor in manifest:
        owner = tensor.owner
        if owner not in open_group or size[owner] + tensor.nbytes > shard_bytes:
            open_group[owner], size[owner] = [], 0
            groups.append(open_group[owner])
        open_group[owner].append(tensor)
        size[owner] += tensor.nbytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, start=1)]


def _write_own_files(
    exporter: HFExporter,
    directory: Path,
    files: list[tuple[str, list[ExportedTensor]]],
    rank: int,
    shared: FusedWriter,
) -> None:
    file_of = {tensor.name: (name, tensors) for name, tensors in files for tensor in tensors}
    writer: SafetensorsWriter | None = None
    current = ""
    for tensor, value in exporter.stream():
        if value is None:
            continue
        if shared.takes(tensor.name):
            shared.write(tensor.name, value.detach().cpu())
            continue
        name, tensors = file_of[tensor.name]
        if name != current:
            if writer is not None:
                writer.close()
            writer, current = SafetensorsWriter(directory / name, tensors), name
        assert writer is not None and tensor.owner == rank
        writer.write(tensor.name, value)
    if writer is not None:
        writer.close()
    shared.close()


def copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer, generation config and so on; `config.json` gets the dtype of the new weights.

    Sub-directories (such as more chat templates) are copied too. Raises ValueError for a link to a file outside
    `source`.
    """
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parts)
        if file.is_file() and not hidden and not name.name.endswith(_WEIGHT_SUFFIXES):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(inside(source, str(name)), target / name)
    before = json.loads((target / "config.json").read_text())
    config = exported_config(before, dtype)
    if config != before:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def exported_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the `config.json` of exported weights: with their dtype, not quantised, without left-out parts."""
    family = family_of(config)
    if family is not None and family.sees in config["architectures"]:
        text, tied = config["text_config"], bool(family.language(config)["tie_word_embeddings"])
        config = {**text, "architectures": [family.architecture], "tie_word_embeddings": tied}
    changed, name = dict(config), str(dtype).removeprefix("torch.")
    changed.pop("quantization_config", None)
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:  # a reader takes either
        changed[key] = name
    for part in ("text_config", "vision_config"):
        if isinstance(config.get(part), dict):
            given = {key: name for key in ("torch_dtype", "dtype") if config[part].get(key)}
            changed[part] = {**config[part], **given}
    for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        if config.get(key):
            changed[key] = 0
    return changed
