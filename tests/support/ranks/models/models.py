"""The work of one rank of a test world with a model: load, packed forward, log-probs, export."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megarl.checkpoint.format.load_weights import load_weights
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.families import FAMILIES
from megarl.models.hf import gather as gather_module
from megarl.models.hf.export import ExportedTensor, HFExporter, save_hf
from megarl.models.hf.gather import GatherRequest, Rows
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.build_model import build_model, transformer_config
from megarl.models.megatron.layout import Layout
from megarl.models.megatron.shards import local_shards, persistent_buffers, table
from megarl.trainer.optimizer import precision_wrap
from tests.support.ranks.models.layouts import make_layout, use_layout

Batch = list[list[list[int]]]  # micro-batches of sequences of token ids


def load(model_dir: str, layout: Layout, precision: str = "fp32", **overrides: Any) -> tuple[ModelInfo, Any, list[Any]]:
    info = load_info(model_dir)
    config = transformer_config(info, layout, precision, overrides, initialize=False)
    chunks = build_model(info, config, layout)
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *dict(persistent_buffers(chunk)).values()):
            tensor.data.fill_(float("nan"))  # whatever the loader forgets shows
    load_weights(chunks, info, model_dir)
    return info, config, chunks


def packed(sequences: list[list[int]], multiple: int) -> dict[str, Any]:
    """A THD micro-batch, padded by one more sequence to a multiple of `multiple` tokens."""
    total = sum(map(len, sequences))
    if total % multiple:
        sequences = [*sequences, [0] * (multiple - total % multiple)]
    lengths = torch.tensor([len(s) for s in sequences])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {
        "input_ids": torch.tensor([token for s in sequences for token in s])[None],
        "position_ids": torch.cat([torch.arange(len(s)) for s in sequences])[None],
        "attention_mask": None,
        "packed_seq_params": params,
    }


def forward_logprobs(info: ModelInfo, layout: Layout, chunks: list[Any], batch: Batch) -> list[torch.Tensor] | None:
    """Log-softmax [T, vocab] of every micro-batch, on the last pipeline stage (all its TP ranks)."""

    def step(data: Iterator[list[list[int]]], model: Any) -> tuple[torch.Tensor, Any]:
        logits = model(**packed(next(data), max(layout.tensor, 1)))

        def collect(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
            full = gather_from_tensor_model_parallel_region(output[0])[:, : info.vocab_size]
            return full.float().log_softmax(-1)

        return logits, collect

    data = [iter(batch) for _ in chunks]
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batch),
            seq_length=8,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return [output[: sum(map(len, sequences))] for output, sequences in zip(outputs, batch, strict=True)]


def logprobs(model_dir: str, batch: Batch, precision: str = "fp32", **sizes: Any) -> list[torch.Tensor] | None:
    """Load under the layout and return the log-probs of the batch from this rank, if it has them."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, _, chunks = load(model_dir, layout, precision)
        return forward_logprobs(info, layout, chunks, batch)


def export(
    model_dir: str,
    out: str,
    shard_bytes: int = 2**30,
    dtype: str = "float32",
    precision: str = "fp32",
    **sizes: Any,
) -> Any:
    """Load, wrap, export to `out`; returns the manifest and the names of the tensors this rank owned."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info, _, chunks = load(model_dir, layout, precision)
        chunks = [precision_wrap(chunk) for chunk in chunks]
        exporter = HFExporter(chunks, info, getattr(torch, dtype))
        save_hf(exporter, model_dir, Path(out), shard_bytes)
        owned = [tensor.name for tensor, value in exporter.stream() if value is not None]
        return exporter.manifest(), owned


def bytes_read(model_dir: str, **sizes: Any) -> tuple[int, int]:
    """Case: (bytes this rank read, bytes of its replicated parameters)."""
    layout = make_layout(**sizes)
    with use_layout(layout):
        info = load_info(model_dir)
        chunks = build_model(info, transformer_config(info, layout, "fp32", initialize=False), layout)
        own = load_weights(chunks, info, model_dir)
        held = [shard for shard in local_shards(chunks, info, table(info)) if not shard.is_tied_copy]
        everyone: list[list[str]] = [[] for _ in range(layout.world_size)]
        torch.distributed.all_gather_object(everyone, [shard.name for shard in held])
        replicated = sum(
            shard.parameter.nbytes
            for shard in held
            if all(shard.name in names for names in everyone) and (shard.entry.rule.axis is None or shard.size == 1)
        )
        return own, replicated


def load_without_qk_norm_rules(model_dir: str) -> None:
    """A family table that forgot the QK norms."""
    family = FAMILIES["qwen3"]
    rules = tuple(rule for rule in family.rules if "q_layernorm" not in rule.megatron)
    layout = make_layout()
    with use_layout(layout), patch.dict(FAMILIES, qwen3=replace(family, rules=rules)):
        info = load_info(model_dir)
        chunks = build_model(info, transformer_config(info, layout, "fp32"), layout)
        local_shards(chunks, info, table(info))


def load_with_wrong_buffers(model_dir: str, what: str) -> None:
    """A family table without the expert bias, or a model without it."""
    family = FAMILIES["deepseek_v3"]
    layout = make_layout()
    rules = tuple(rule for rule in family.rules if what != "no rule" or not rule.buffer)
    with use_layout(layout), patch.dict(FAMILIES, deepseek_v3=replace(family, rules=rules)):
        info = load_info(model_dir)
        built = replace(info, expert_bias=what != "no buffer")
        chunks = build_model(built, transformer_config(built, layout, "fp32"), layout)
        local_shards(chunks, info, table(info))


def shard_attributes(model_dir: str, initialize: bool) -> dict[str, tuple[Any, ...]]:
    """The attributes of each parameter that Megatron's gradient norm and reductions read, under TP 2 + SP."""
    layout = make_layout(tensor=2, sequence=True)
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
    with use_layout(layout):
        info = load_info(model_dir)
        config = transformer_config(info, layout, "fp32", initialize=initialize)
        (chunk,) = build_model(info, config, layout)
        return {
            name: tuple(getattr(parameter, attribute, None) for attribute in names)
            for name, parameter in chunk.named_parameters()
        }


def gathered_rows(model_dir: str, seed: int, dtype: str, direct_bytes: int, **sizes: Any) -> int:
    """Gather random rows of several tensors at a time, twice, the second time after the weights have changed.

    `direct_bytes`: the size from which blocks have a message of their own.
    Returns how many of this rank's gathers had messages to send or receive.
    """
    layout = make_layout(**sizes)
    with use_layout(layout), patch.object(gather_module, "DIRECT_BYTES", direct_bytes):
        info, _, chunks = load(model_dir, layout)
        exporter = HFExporter(chunks, info, getattr(torch, dtype))
        manifest = exporter.manifest()
        generator = torch.Generator().manual_seed(seed)
        owners: dict[int, list[int]] = {}
        for number, item in enumerate(manifest):
            owners.setdefault(item.owner, []).append(number)
        requests = [random_request(manifest, own, generator) for own in owners.values() for _ in range(12)]
        gathers = exporter.gathers(requests, torch.device("cpu"))
        for _ in range(2):
            whole = {item.name: value.clone() for item, value in exporter.stream() if value is not None}
            for request, gather in zip(requests, gathers, strict=True):
                if gather is None:
                    continue
                for target in request.targets:
                    target.fill_(float("nan"))
                gather.copy()
                gather.post()
                assert gather.done(30.0) and gather.unfinished_peers() == ()
                gather.finish()
                if gather.owned:
                    for rows, target in zip(request.rows, request.targets, strict=True):
                        expected = whole[manifest[rows.tensor].name][rows.start : rows.stop]
                        assert torch.equal(target, expected), manifest[rows.tensor].name
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data = parameter.data + 1.0  # in new memory
        return sum(gather is not None and bool(gather.peers) for gather in gathers)


def random_request(manifest: Sequence[ExportedTensor], own: list[int], generator: torch.Generator) -> GatherRequest:
    """Up to six tensors of one owner, in order, and some of their rows; with targets on every rank."""

    def below(stop: int) -> int:
        return int(torch.randint(0, stop, (1,), generator=generator))

    rows, targets = [], []
    for number in sorted({own[below(len(own))] for _ in range(6)}):
        shape = manifest[number].shape
        start = below(shape[0])
        rows.append(Rows(number, start, start + 1 + below(shape[0] - start)))
        targets.append(torch.empty((rows[-1].stop - start, *shape[1:]), dtype=manifest[number].dtype))
    return GatherRequest(tuple(rows), tuple(targets))
