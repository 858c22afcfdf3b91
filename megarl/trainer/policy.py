"""The policy on this rank: its share of the model, the log-prob passes and the updates, through Megatron-Core.

The loss of a micro-batch is its share of the mini-batch's objective, by token weights that global counts determine. The
shares add up, so no split into micro-batches, replicas or pipeline stages can change the gradient.

Shapes: T tokens of a micro-batch, R response tokens, H hidden size, K sum keys and M maximum keys of the loss
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megarl import platforms
from megarl.algorithms.aggregation import GlobalCounts
from megarl.algorithms.losses import LossFunction, LossInputs, LossSpec, MicroBatchLoss, micro_batch_loss
from megarl.algorithms.stats import LossStats
from megarl.checkpoint.format.load_weights import load_weights
from megarl.common.object_collectives import Codec, all_gather, codec_of
from megarl.config.megatron_defaults import transformer_fields
from megarl.config.old_logprobs import correction_of, recomputes_old_logprobs
from megarl.config.schema import Config
from megarl.models.info import ModelInfo
from megarl.models.layout import Layout
from megarl.models.provider import build_model, transformer_config
from megarl.queue.streams import ADVANTAGES, OLD_LOGPROBS, REFERENCE_LOGPROBS, ROLLOUT_LOGPROBS
from megarl.trainer.batch import MicroBatch, TrainSample, check_samples, common_streams, pack, unpack
from megarl.trainer.compiled_head import is_compiled
from megarl.trainer.head import response_logprobs, return_hidden_states
from megarl.trainer.moe import aux_loss_metrics, clear_aux_losses
from megarl.trainer.optimizer import (
    NonFiniteError,
    aux_loss_scale,
    build_optimizer,
    build_scheduler,
    data_parallel_wrap,
    precision_wrap,
)
from megarl.trainer.packing import plan_micro_batches
from megarl.trainer.pipeline import WithLoss, forward_backward, forward_only
from megarl.trainer.reference_policy import ReferenceModel

__all__ = ["LogProbs", "NonFiniteError", "Policy", "TrainSample"]


@dataclass(frozen=True)
class LogProbs:
    """The log-probs of one sample's response tokens at the sampling temperature, fp32, on the CPU."""

    logprobs_R: Tensor


@dataclass(frozen=True)
class _PackedBatch:
    """The micro-batches of this replica, and counts over all replicas."""

    indices: list[list[int]]  # per micro-batch, of this replica's samples
    micro_batches: list[MicroBatch]
    counts: GlobalCounts
    tokens: int  # of all samples of all replicas, prompts included
    non_empty: int  # micro-batches of all replicas that hold samples


@dataclass(frozen=True)
class _Shapes:
    """The facts about its samples that a replica sends to all replicas."""

    samples: list[tuple[int, int]]  # (tokens, trained tokens) of each sample
    streams: list[str]  # the streams that all its samples have


_SHAPES: Codec[_Shapes] = codec_of(_Shapes)


def _agreed_streams(replicas: Sequence[_Shapes]) -> list[str]:
    """Return the streams that all samples of all replicas have. A replica without samples packs the same streams."""
    found = [set(replica.streams) for replica in replicas if replica.samples]
    return sorted(set.intersection(*found)) if found else []


def _needed_streams(config: Config, spec: LossSpec) -> list[str]:
    """Return the streams without which the configured loss would fail, or would be another one."""
    return [
        ADVANTAGES,
        *([OLD_LOGPROBS] if spec.correction is None or recomputes_old_logprobs(config) else []),
        *([ROLLOUT_LOGPROBS] if spec.correction else []),
        *([REFERENCE_LOGPROBS] if spec.kl_coef else []),
    ]


class Policy:
    """Holds model, optimizer and schedule of this rank. All methods are collective over the world.

    `parallel.initialize(layout, ...)` must have been called. The reference model is built only if the config needs one.
    `loss` replaces the loss that the config section `algorithm` describes.
    """

    def __init__(self, config: Config, layout: Layout, info: ModelInfo, loss: LossFunction | None = None) -> None:
        self.config, self.layout, self.info = config, layout, info
        algorithm = config.algorithm
        self._spec = LossSpec(
            kind=algorithm.loss,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_dual=algorithm.clip_dual,
            kl_coef=algorithm.kl.coef if algorithm.kl.where == "loss" else 0.0,
            kl_estimator=algorithm.kl.estimator,
            entropy_coef=algorithm.entropy_coef,
            aggregation=algorithm.aggregation,
            correction=correction_of(config),
        )
        self._loss = loss or self._configured_loss
        self._compiled_head = is_compiled(config.trainer.compile_logprobs)
        # A loss that the caller brought may need the entropy; the configured one needs it for its bonus only.
        self._needs_entropy = loss is not None or algorithm.entropy_coef != 0
        self._needed_streams = _needed_streams(config, self._spec) if loss is None else []
        self.tf_config = transformer_config(
            info,
            layout,
            config.trainer.precision,
            transformer_fields(config),
            initialize=not config.model.load_weights,
        )
        if not self.tf_config.calculate_per_token_loss:
            raise ValueError(
                "megatron.transformer.calculate_per_token_loss=false would average micro-batch means; remove it"
            )
        chunks = build_model(info, self.tf_config, layout)
        if config.model.load_weights:
            load_weights(chunks, info, config.model.path)
        for chunk in chunks:
            return_hidden_states(chunk)
        self.module_chunks = data_parallel_wrap(config, self.tf_config, [precision_wrap(c) for c in chunks])
        if not config.model.load_weights:
            for wrapped in self.module_chunks:
                wrapped.broadcast_params()
        self.optimizer = build_optimizer(config, self.module_chunks)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.reference = ReferenceModel(config, layout, info) if config.needs_reference else None

    @property
    def uploads_reference(self) -> bool:
        """Tell whether each pass of the reference model brings its weights to the device."""
        return self.reference is not None and self.reference.placement.uploads

    def compute_logprobs(self, samples: Sequence[TrainSample], *, reference: bool = False) -> list[LogProbs]:
        """Return the log-probs of this replica's samples under the policy (or the reference), in the same order.

        Call it on every rank with the samples of its replica, which may be none. All micro-batches run through the
        pipeline in one pass; the result is complete on every rank.

        Raises:
            ValueError: `reference` is True, but there is no reference model.
        """
        if reference and self.reference is None:
            raise ValueError("there is no reference model because algorithm.kl.coef is 0")
        plan = self._plan(samples)
        chunks = self.reference.chunks if reference and self.reference else self.module_chunks
        resident = self.reference.placement.resident() if reference and self.reference else nullcontext()

        def rows(chunk: GPTModel, hidden_1TH: Tensor, batch: MicroBatch) -> Tensor:
            return self._response_logprobs(chunk, hidden_1TH, batch, with_entropy=False)[0]

        with resident:
            parts = forward_only(chunks, plan.micro_batches, rows)
        logprobs_R = self._from_last_stage(parts, plan)
        results: list[LogProbs | None] = [None] * len(samples)
        offset = 0
        for indices in plan.indices:
            size = sum(len(samples[index].response_ids) for index in indices)
            pieces = unpack(logprobs_R[offset : offset + size], samples, indices)
            for index, piece_R in zip(indices, pieces, strict=True):
                results[index] = LogProbs(piece_R.clone())
            offset += size
        return [result for result in results if result is not None]

    def update(
        self,
        samples: Sequence[TrainSample],
        counts: GlobalCounts | None = None,
        *,
        another_follows: bool = False,
        measure_entropy: bool = True,
    ) -> dict[str, float]:
        """Make one optimizer update on a mini-batch. `samples` are this replica's, `counts` those of all replicas.

        `another_follows`: the next call is another update, whose forward pass then gathers the new weights layer by
        layer (`overlap_param_gather`). Otherwise the weights are complete when the method returns.
        `measure_entropy`: False saves the pass over the logits that the entropy needs, unless the loss contains it.

        Returns:
            Metrics reduced over all ranks and equal on each: `LossStats.means`, with a correction
            `LossStats.correction_means`, lr, grad_norm, MoE losses. An entropy that was not computed is left out.

        Raises:
            ValueError: `counts` differs from the counts of all replicas' samples, no sample has a trained token, or a
                sample lacks a stream that the loss needs (`advantages`, `old_logprobs`, ...).
            NonFiniteError: the loss or the gradient norm is not finite; no weight has changed, nor has the schedule.
        """
        metrics = self.compute_gradients(samples, counts, measure_entropy=measure_entropy)
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteError(f"the loss is {metrics['loss']}; no weight was changed")
        self.scheduler.step(1)
        try:
            _, grad_norm, _ = self.optimizer.step()
        except NonFiniteError:
            self.scheduler.step(-1)  # it counts updates, and the rate depends on nothing but their number
            raise
        for chunk in self.module_chunks:
            if chunk.ddp_config.overlap_param_gather and not another_follows:
                # Without this call the gather starts in the next forward, but export and weight sync come before it.
                chunk.start_param_sync(force_sync=True)
        return metrics | {"grad_norm": float(grad_norm), "lr": self.learning_rate}

    def compute_gradients(
        self, samples: Sequence[TrainSample], counts: GlobalCounts | None = None, *, measure_entropy: bool = True
    ) -> dict[str, float]:
        """Run the first half of `update`: leave reduced gradients in DDP's buffers, return the loss's metrics.

        The weights do not change. Raises as `update` does, except NonFiniteError.
        """
        self._check_trainable(samples)
        plan = self._plan(samples)
        if counts is not None and counts != plan.counts:
            raise ValueError(f"the replicas hold {plan.counts} together, but the caller counted {counts}")
        if not plan.counts.tokens:
            raise ValueError("no replica holds a trained token; skip this update")
        for chunk in self.module_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        clear_aux_losses()
        with_entropy = measure_entropy or self._needs_entropy
        parts = forward_backward(self.module_chunks, plan.micro_batches, self._loss_function(plan, with_entropy))
        metrics = self._reduce(parts) | aux_loss_metrics(self.tf_config, plan.non_empty)
        if not with_entropy:
            del metrics["entropy"]
        return metrics

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update; before the first update, that of the schedule's start."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _configured_loss(self, inputs: LossInputs) -> MicroBatchLoss:
        return micro_batch_loss(self._spec, inputs)

    def _loss_function(self, plan: _PackedBatch, with_entropy: bool) -> WithLoss[LossStats]:
        """Return the function that the pipeline calls on the hidden states of each micro-batch."""
        scale = plan.tokens / aux_loss_scale(self.tf_config)

        def loss(chunk: GPTModel, hidden_1TH: Tensor, batch: MicroBatch) -> tuple[Tensor, int, LossStats]:
            logprobs_R, entropy_R = self._response_logprobs(chunk, hidden_1TH, batch, with_entropy)
            result = self._loss(
                LossInputs(
                    logprobs_R=logprobs_R,
                    mask_R=batch.mask_R,
                    cu_seqlens=batch.response_cu_seqlens,
                    counts=plan.counts,
                    streams=batch.streams,
                    entropy_R=entropy_R,
                )
            )
            # Megatron multiplies all gradients by `aux_loss_scale` and divides them by the sum of `tokens`, as the
            # routers' auxiliary losses need. The policy loss is an exact share already: `scale` cancels both.
            return result.loss * scale, batch.tokens, result.stats

        return loss

    def _response_logprobs(
        self, chunk: GPTModel, hidden_1TH: Tensor, batch: MicroBatch, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return response_logprobs(
            chunk,
            hidden_1TH,
            batch,
            temperature=self.config.sampling.temperature if batch.temperature_R is None else batch.temperature_R,
            vocab_size=self.info.vocab_size,
            chunk_rows=self.config.trainer.logprob_chunk_tokens,
            with_entropy=with_entropy,
            compiled=self._compiled_head,
        )

    def _plan(self, samples: Sequence[TrainSample]) -> _PackedBatch:
        """Agree with the other replicas on the number of micro-batches, and pack those of this replica. Collective."""
        check_samples(samples, self.info.vocab_size)
        group = parallel_state.get_data_parallel_group()
        own = _Shapes([(sample.length, sample.trained_tokens) for sample in samples], common_streams(samples))
        everyone = all_gather(own, _SHAPES, group)
        shapes = [part.samples for part in everyone]
        streams = _agreed_streams(everyone)
        interleaved = self.layout.virtual_pipeline is not None
        plans = plan_micro_batches(
            [[length for length, _ in rank] for rank in shapes],
            self.config.trainer.token_limit,
            multiple_of=self.layout.pipeline if interleaved else 1,
            minimum=self.layout.pipeline,  # fewer leave stages idle, and fail in an interleaved schedule
        )
        tensor = self.layout.tensor if self.layout.sequence else 1
        mine = plans[group.rank()]
        device = platforms.current().device
        counts = GlobalCounts.of([trained for rank in shapes for _, trained in rank], self.config.sampling.max_tokens)
        return _PackedBatch(
            indices=mine,
            micro_batches=[pack(samples, indices, tensor, streams).to(device) for indices in mine],
            counts=counts,
            tokens=sum(length for rank in shapes for length, _ in rank),
            non_empty=sum(bool(indices) for plan in plans for indices in plan),
        )

    def _check_trainable(self, samples: Sequence[TrainSample]) -> None:
        for sample in samples:
            for name in self._needed_streams:
                if name not in sample.streams:
                    raise ValueError(f"sample {sample.key} has no {name}, which the loss needs")

    def _from_last_stage(self, parts: list[Tensor], plan: _PackedBatch) -> Tensor:
        """Return the last stage's `parts` ([R] each) on every rank of the replica, on the CPU.

        The result is fp32 [R] with R over all non-empty micro-batches.
        """
        sizes = [batch.targets_R.numel() for batch in plan.micro_batches if not batch.is_empty]
        device = platforms.current().device
        values_R = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        kept = [part for part, batch in zip(parts, plan.micro_batches, strict=False) if not batch.is_empty]
        if kept:
            values_R = torch.cat(kept)
        if self.layout.pipeline > 1 and sizes:
            torch.distributed.broadcast(
                values_R,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return values_R.cpu()

    def _reduce(self, parts: list[LossStats]) -> dict[str, float]:
        """Reduce the statistics of all micro-batches of all replicas, to which one rank per replica contributes."""
        device = platforms.current().device
        contributes = parallel_state.is_pipeline_last_stage() and (parallel_state.get_tensor_model_parallel_rank() == 0)
        stats = LossStats.merge(parts if contributes else [], device)
        sums_K, maxima_M = stats.sum_vector(), stats.max_vector()
        torch.distributed.all_reduce(sums_K)
        torch.distributed.all_reduce(maxima_M, op=torch.distributed.ReduceOp.MAX)
        reduced = LossStats.from_vectors(sums_K.cpu(), maxima_M.cpu())
        return reduced.means() | (reduced.correction_means() if self._spec.correction else {})
