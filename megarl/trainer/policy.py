"""The policy on this rank: its share of the model, log-prob passes and updates, through Megatron-Core.

A micro-batch's loss is its share of the mini-batch's objective; global counts determine the token weights. Shares add
up, so no split into micro-batches, replicas or pipeline stages changes the gradient.

Shapes: T tokens of a micro-batch, R response tokens, H hidden size, K sum and M maximum keys of the loss statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megarl import platforms
from megarl.algorithms.objective.objective import (
    WEIGHT_STREAMS,
    GlobalCounts,
    LossFunction,
    LossInputs,
    TermCounts,
    count_terms,
    micro_batch_loss,
)
from megarl.algorithms.objective.stats import LossStats, OriginGaps
from megarl.checkpoint.format.load_weights import load_weights
from megarl.common.process.memory_tuning import anonymous_bytes, keep_freed_memory
from megarl.common.trust.object_collectives import Codec, all_gather, codec_of
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.derived.logprob_passes import recomputes_old_logprobs
from megarl.config.derived.teachers import trainer_teachers
from megarl.config.derived.training_loss import needed_streams, objective_of
from megarl.config.megatron.reserved import ddp_fields, transformer_fields
from megarl.config.schema import LOGPROB_CHUNK_ROWS, Config
from megarl.models.architecture.architecture import ModelInfo, VisionTower
from megarl.models.families import FAMILIES
from megarl.models.families.vision import frozen_tensors
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.build_model import build_model, transformer_config
from megarl.models.megatron.layout import Layout
from megarl.models.megatron.shards import unwrap
from megarl.queue.routes import Routes
from megarl.queue.streams import OLD_LOGPROBS, ROLLOUT_LOGPROBS, SOURCES
from megarl.trainer.batch import (
    MicroBatch,
    TrainSample,
    agreed_streams,
    check_routes,
    check_samples,
    common_streams,
    pack,
    unpack,
    unzigzag,
)
from megarl.trainer.logprobs import response_logprobs, return_hidden_states
from megarl.trainer.moe import AuxLosses, RoutedExperts, gathered
from megarl.trainer.optimizer import (
    NonFiniteError,
    StepRefused,
    build_optimizer,
    build_scheduler,
    data_parallel_wrap,
    precision_wrap,
)
from megarl.trainer.packing import Patches, padded, plan_micro_batches
from megarl.trainer.parking import StateMemory
from megarl.trainer.pipeline import WithLoss, forward_backward, forward_only
from megarl.trainer.reference_policy import FrozenModel, ReferenceModel

if TYPE_CHECKING:
    from megarl.trainer.packed_images import ImagePacker

__all__ = ["NoTokensError", "NonFiniteError", "Policy", "StepRefused", "TrainSample"]


class NoTokensError(ValueError):
    """No token of a mini-batch has a weight in any term of the loss. Raised on all ranks, before anything changes."""


@dataclass(frozen=True)
class _Shapes:
    """What a replica reports about its samples to all replicas."""

    lengths: list[int]  # tokens of prompt and response
    images: list[int]  # image tokens among them
    trained: list[int]  # tokens in the loss
    streams: list[str]  # `common_streams` of its samples


_SHAPES: Codec[_Shapes] = codec_of(_Shapes)
_COUNTS: Codec[TermCounts] = codec_of(TermCounts)


class Policy:
    """Holds model, optimizer and schedule of this rank. All methods are collective over all ranks.

    Call `parallel.initialize(layout, ...)` first. The reference model is built only if the config needs one. `loss`
    replaces the loss of the config section `algorithm`.
    """

    def __init__(self, config: Config, layout: Layout, info: ModelInfo, loss: LossFunction | None = None) -> None:
        before = anonymous_bytes()
        self.config, self.layout, self.info = config, layout, info
        self._objective = objective_of(config)
        self._loss = loss or partial(micro_batch_loss, self._objective)
        self._compiled_head = platforms.current().is_cuda
        # A caller's loss may need the entropy; the configured loss needs it for its bonus only.
        self._needs_entropy = loss is not None or self._objective.entropy_coef != 0
        self._needed_streams = needed_streams(config, self._objective) if loss is None else []
        # The stream of the engine's log-probs, for updates that compare them with the trainer's by source.
        self._engine_stream = ROLLOUT_LOGPROBS if self._objective.correction else OLD_LOGPROBS
        self._buckets = 0 if recomputes_old_logprobs(config) else SourceBuckets.of(config).size
        self.source_gaps = OriginGaps.zeros(self._buckets)  # of the last update over all ranks, on the CPU
        # Keys of this replica's samples that went through the last update's backward passes.
        self.trained_keys: list[str] = []
        precision, fields = config.trainer.precision, transformer_fields(config.trainer, config.megatron)
        replays = {"moe_enable_routing_replay": True} if config.trainer.router_replay != "none" else {}
        self.tf_config = transformer_config(
            info, layout, precision, fields | replays, initialize=not config.model.load_weights
        )
        chunks = build_model(info, self.tf_config, layout)
        if config.model.load_weights:
            load_weights(chunks, info, config.model.path)
        self.images: ImagePacker | None = None  # None for a text-only model
        if info.vision is not None:
            self.images = self._prepare_vision(info.vision, chunks)
        for chunk in chunks:
            return_hidden_states(chunk)
        # None: the routers always choose, as those of the reference and the teachers do.
        self.routed = RoutedExperts(chunks, self.tf_config) if replays else None
        self._aux_losses = AuxLosses(chunks, self.tf_config)
        ddp = ddp_fields(config.trainer, config.megatron)
        self.module_chunks = data_parallel_wrap(ddp, self.tf_config, list(map(precision_wrap, chunks)))
        if not config.model.load_weights:
            for wrapped in self.module_chunks:
                wrapped.broadcast_params()
        self.optimizer = build_optimizer(config.trainer, config.megatron.optimizer, self.module_chunks)
        updates = config.run.steps * config.trainer.mini_batches
        self.scheduler = build_scheduler(config.trainer.optimizer, updates, self.optimizer)
        self.reference: ReferenceModel | None = None
        place = config.reference.placement
        if config.needs_reference:
            path = config.reference.path or config.model.path
            self.reference = ReferenceModel(info, layout, path, place, precision, fields)
        self.teachers = {
            each.name: FrozenModel(load_info(each.path), layout, each.path, place, precision, fields)
            for each in trainer_teachers(config.teachers)
        }
        frozen = [*self.teachers.values(), *([self.reference] if self.reference is not None else [])]
        others = [chunk for each in frozen for chunk in each.chunks]
        self.memory = StateMemory(self.module_chunks, self.optimizer, others, before)
        models: Iterable[Any] = map(unwrap, (*self.module_chunks, *others)) if self.images is not None else ()
        self._feature_caches = [model.feature_cache for model in models if model.pre_process]
        if not platforms.current().is_cuda:
            keep_freed_memory()

    def _prepare_vision(self, tower: VisionTower, chunks: Sequence[GPTModel]) -> ImagePacker:
        """Freeze the parts of the tower that `model.vision.train` excludes; return the packer of images."""
        from megarl.models.megatron.vision_model import freeze_vision
        from megarl.trainer.packed_images import ImagePacker

        freeze_vision(chunks, self.config.model.vision.train)
        return ImagePacker(self.config.model, tower)

    def show_images(self, files: Mapping[str, bytes]) -> None:
        """Set the image files of the next samples, by hash, and clear the cached features of earlier images."""
        if self.images is not None:
            self.images.files = files
        for cache in self._feature_caches:
            cache.clear()

    @property
    def frozen_tensors(self) -> tuple[str, ...]:
        """Hugging Face names of the weights that no update changes."""
        return frozen_tensors(FAMILIES[self.info.family].vision(self.info), self.config.model.vision.train)

    @property
    def reference_step(self) -> int:
        """The step after which the reference model last took the policy's weights; 0: never."""
        return 0 if self.reference is None else self.reference.refreshed

    def refresh_reference(self, steps_done: int) -> bool:
        """Copy the policy's weights to the reference model if due after `steps_done` steps; return whether it was.

        Every rank must call it; each copies its own shards.
        """
        every = self.config.reference.refresh_steps
        if self.reference is None or every is None or steps_done == 0 or steps_done % every:
            return False
        self.reference.take_weights(self.module_chunks, steps_done)
        return True

    def compute_logprobs(
        self, samples: Sequence[TrainSample], *, reference: bool = False, teacher: str = ""
    ) -> list[Tensor]:
        """Return the log-probs of the response tokens of this replica's samples, fp32 [R] each, on the CPU, in order.

        Of the policy, the `reference`, or a `teacher` on the trainer's ranks, at the sampling temperature. Call it on
        every rank with its replica's samples, which may be none. All micro-batches run through the pipeline in one
        pass; the result is complete on every rank.

        Raises:
            ValueError: `reference` is True, but there is no reference model.
            KeyError: the ranks hold no such teacher.
        """
        if reference and self.reference is None:
            raise ValueError("there is no reference model because algorithm.kl.coef is 0")
        frozen = self.teachers[teacher] if teacher else self.reference if reference else None
        given = self.config.trainer.router_replay == "r3" or any(each.routes_TLK is not None for each in samples)
        if frozen is None and given:
            self._check_routes(samples)
        micro_batches, _ = self._pack(samples, self._gather_shapes(samples))
        chunks = self.module_chunks if frozen is None else frozen.chunks
        vocabulary = (self.info if frozen is None else frozen.info).vocab_size

        def rows(chunk: GPTModel, hidden_1TH: Tensor, batch: MicroBatch) -> Tensor:
            return self._response_logprobs(chunk, hidden_1TH, batch, with_entropy=False, vocab_size=vocabulary)[0]

        if frozen is not None:
            with frozen.placement.resident():
                parts = forward_only(chunks, micro_batches, rows)
        else:
            parts = forward_only(chunks, micro_batches, rows, self.routed)
            self._keep_routes(samples, micro_batches)
        logprobs_R = self._from_last_stage(parts, micro_batches)
        order = [index for batch in micro_batches for index in batch.samples]
        by_index = dict(zip(order, unpack(logprobs_R, samples, order), strict=True))
        return [by_index[index].clone() for index in range(len(samples))]

    def set_routes(self, samples: Iterable[TrainSample], routes: Mapping[str, Routes | None]) -> None:
        """Let this rank's routers replay the engines' choices of experts, with `trainer.router_replay: r3`.

        `routes`: by sample key. Passes and updates refuse a sample without routes.
        """
        for sample in samples if self.config.trainer.router_replay == "r3" else ():
            if self.routed is not None and (given := routes[sample.key]) is not None:
                sample.routes_TLK = self.routed.own(given, self.info.moe_layers)

    def _check_routes(self, samples: Sequence[TrainSample]) -> None:
        if self.routed is not None:
            check_routes(samples, self.routed.spec)

    def _keep_routes(self, samples: Sequence[TrainSample], micro_batches: Sequence[MicroBatch]) -> None:
        """End a pass of the policy; give samples without routes the recorded ones."""
        if self.routed is None:
            return
        free = [batch for batch in micro_batches if batch.routes_TLK is None]
        group = parallel_state.get_context_parallel_group()
        for batch, routes_TLK in zip(free, self.routed.end(), strict=True):
            parts = gathered(routes_TLK, group) if group.size() > 1 else [routes_TLK]
            routes_PLK = unzigzag(parts, batch.cu_seqlens).cpu()
            for index, start in zip(batch.samples, batch.cu_seqlens.tolist(), strict=False):
                samples[index].routes_TLK = routes_PLK[start : start + samples[index].length].clone()

    def update(
        self,
        samples: Sequence[TrainSample],
        counts: GlobalCounts | None = None,
        *,
        another_follows: bool = False,
        measure_entropy: bool = True,
        check: Callable[[Mapping[str, float]], None] = lambda metrics: None,
    ) -> dict[str, float]:
        """Make one optimizer update on a mini-batch. `samples` are this replica's, `counts` those of all replicas.

        `another_follows`: the next call is another update, whose forward pass gathers the new weights layer by layer
        (`overlap_param_gather`). Otherwise the weights are complete on return. `measure_entropy`: False saves the
        entropy's pass over the logits, unless the loss contains it. `check` is called on every rank with the loss's
        metrics before a weight changes, and may raise StepRefused.

        Returns:
            Metrics reduced over all ranks and equal on each: `LossStats.means`, with a correction
            `LossStats.correction_means`, lr, grad_norm, MoE losses, and the entropy if it was computed.

        Raises:
            ValueError: `counts` differs from the counts of all replicas' samples, or a sample lacks a stream that the
                loss needs (`advantages`, `old_logprobs`, ...).
            NoTokensError: no sample has a trained token, or none of them has a weight in any term.
            NonFiniteError: the loss or gradient norm is not finite; weights and schedule are unchanged.
        """
        try:
            metrics = self.compute_gradients(samples, counts, measure_entropy=measure_entropy)
        except NoTokensError:
            if not another_follows:  # the previous update left gathering its weights to this one
                self._complete_weights()
            raise
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteError(f"the loss is {metrics['loss']}; no weight was changed")
        check(metrics)
        self.scheduler.step(1)
        try:
            _, grad_norm, _ = self.optimizer.step()
        except NonFiniteError:
            self.scheduler.step(-1)  # the rate depends only on the number of updates
            raise
        if not another_follows:
            self._complete_weights()
        return metrics | {"grad_norm": float(grad_norm), "lr": self.learning_rate}

    def _complete_weights(self) -> None:
        """Gather the new weights if the next forward pass would: export and weight sync come first."""
        for chunk in self.module_chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def compute_gradients(
        self, samples: Sequence[TrainSample], counts: GlobalCounts | None = None, *, measure_entropy: bool = True
    ) -> dict[str, float]:
        """Run the first half of `update`: leave reduced gradients in DDP's buffers, return the loss's metrics.

        The weights do not change. Raises like `update`, except NonFiniteError.
        """
        self._check_trainable(samples)
        self._check_routes(samples)
        everyone = self._gather_shapes(samples)
        trained = [tokens for part in everyone for tokens in part.trained]
        found = GlobalCounts.of(trained, self.config.sampling.max_tokens)
        if counts is not None and counts != found:
            raise ValueError(f"the replicas hold {found} together, but the caller counted {counts}")
        if not found.tokens:
            raise NoTokensError("no replica holds a trained token; skip this update")
        micro_batches, non_empty = self._pack(samples, everyone)
        terms = self._term_counts(samples, found, micro_batches[0].streams)
        for chunk in self.module_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._aux_losses.clear()
        with_entropy = measure_entropy or self._needs_entropy
        gaps = OriginGaps.zeros(self._buckets, platforms.current().device)
        tokens = sum(sum(part.lengths) for part in everyone)
        function = self._loss_function(tokens, terms, with_entropy, gaps)
        keys: list[str] = []
        routed = self.routed
        parts = forward_backward(
            self.module_chunks, micro_batches, function, lambda batch: keys.extend(batch.keys), routed
        )
        if routed is not None:
            routed.end()
        self.trained_keys = keys
        metrics = self._reduce(parts, gaps) | self._aux_losses.metrics(non_empty, tokens)
        if not with_entropy:
            del metrics["entropy"]
        return metrics

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update; before any update, the schedule's first."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _term_counts(
        self, samples: Sequence[TrainSample], trained: GlobalCounts, streams: Collection[str]
    ) -> TermCounts:
        """Return the counts of each term over all replicas. Collective if `streams` contains weights.

        Raises NoTokensError if no token is in any term.
        """
        if not any(name in streams for name in WEIGHT_STREAMS):
            return TermCounts.without_streams(trained)
        own = count_terms(((sample.trained_mask, sample.streams) for sample in samples), trained.max_tokens)
        everyone = all_gather(own, _COUNTS, parallel_state.get_data_parallel_group())
        counts = TermCounts.total(everyone, trained.max_tokens)
        if counts.empty:
            raise NoTokensError("no token has a weight in any term of the loss; skip this update")
        return counts

    def _loss_function(
        self, tokens: int, terms: TermCounts, with_entropy: bool, gaps: OriginGaps
    ) -> WithLoss[LossStats]:
        """Return the function that the pipeline calls on each micro-batch's hidden states; it adds to `gaps`.

        `tokens`: of all samples of all replicas, including prompts.
        """

        def loss(chunk: GPTModel, hidden_1TH: Tensor, batch: MicroBatch) -> tuple[Tensor, int, LossStats]:
            logprobs_R, entropy_R = self._response_logprobs(chunk, hidden_1TH, batch, with_entropy)
            if self._buckets and SOURCES in batch.streams:
                gaps.add(batch.streams[self._engine_stream], logprobs_R, batch.mask_R, batch.streams[SOURCES])
            result = self._loss(
                LossInputs(
                    logprobs_R=logprobs_R,
                    mask_R=batch.mask_R,
                    cu_seqlens=batch.response_cu_seqlens,
                    counts=terms,
                    streams=batch.streams,
                    entropy_R=entropy_R,
                )
            )
            # Megatron divides all gradients by the sum of `tokens`, for the routers' auxiliary losses. The policy loss
            # is an exact share already, so the factor cancels the division.
            return result.loss * tokens, batch.tokens, result.stats

        return loss

    def _response_logprobs(
        self,
        chunk: GPTModel,
        hidden_1TH: Tensor,
        batch: MicroBatch,
        with_entropy: bool,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        return response_logprobs(
            chunk,
            hidden_1TH,
            batch,
            temperature=self.config.sampling.temperature if batch.temperature_R is None else batch.temperature_R,
            vocab_size=vocab_size or self.info.vocab_size,
            chunk_rows=LOGPROB_CHUNK_ROWS,
            with_entropy=with_entropy,
            compiled=self._compiled_head,
        )

    def _gather_shapes(self, samples: Sequence[TrainSample]) -> list[_Shapes]:
        """Report these samples to all replicas; return what each reports. Collective."""
        self.memory.require()
        trained = [sample.trained_tokens for sample in samples]
        images = [sample.image_tokens for sample in samples]
        own = _Shapes([sample.length for sample in samples], images, trained, common_streams(samples))
        return all_gather(own, _SHAPES, parallel_state.get_data_parallel_group())

    def _pack(self, samples: Sequence[TrainSample], everyone: Sequence[_Shapes]) -> tuple[list[MicroBatch], int]:
        """Return this replica's micro-batches on the device, and the number of non-empty ones of all replicas.

        Raises ValueError for an invalid sample.
        """
        check_samples(samples, self.info.vocab_size, sees=self.images is not None)
        layout, stages = self.layout, self.layout.pipeline
        plans = plan_micro_batches(
            [[padded(length, layout.context) for length in part.lengths] for part in everyone],
            padded(self.config.trainer.token_limit, layout.context),
            multiple_of=stages if layout.virtual_pipeline else 1,
            minimum=stages,  # fewer leave stages idle, and fail in an interleaved schedule
            patches=self._patches(everyone),
        )
        streams = agreed_streams(part.streams for part in everyone if part.lengths)
        align, device = layout.tensor if layout.sequence else 1, platforms.current().device
        context = parallel_state.get_context_parallel_rank(), layout.context
        mine = plans[parallel_state.get_data_parallel_rank()]
        micro_batches = [pack(samples, indices, align, streams, self.images, context).to(device) for indices in mine]
        return micro_batches, sum(bool(indices) for plan in plans for indices in plan)

    def _patches(self, everyone: Sequence[_Shapes]) -> Patches | None:
        most, packer = self.config.trainer.micro_batch_patches, self.images
        if packer is None or most is None:
            return None
        return Patches([[count * packer.merge**2 for count in part.images] for part in everyone], most)

    def _check_trainable(self, samples: Sequence[TrainSample]) -> None:
        for sample in samples:
            for name in self._needed_streams:
                if name not in sample.streams:
                    raise ValueError(f"sample {sample.key} has no {name}, which the loss needs")

    def _from_last_stage(self, parts: list[Tensor], micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the last stage's `parts` ([R] each) on every rank of the replica, on the CPU.

        The result is fp32 [R] with R over all non-empty micro-batches.
        """
        sizes = [batch.targets_R.numel() for batch in micro_batches if not batch.is_empty]
        device = platforms.current().device
        values_R = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        kept = [part for part, batch in zip(parts, micro_batches, strict=False) if not batch.is_empty]
        if kept:
            values_R = torch.cat(kept)
        if self.layout.pipeline > 1 and sizes:
            torch.distributed.broadcast(
                values_R,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return values_R.cpu()

    def _reduce(self, parts: list[LossStats], gaps: OriginGaps) -> dict[str, float]:
        """Reduce the statistics of all micro-batches of all replicas; one rank per replica contributes.

        The same collectives reduce `source_gaps`.
        """
        device = platforms.current().device
        first = parallel_state.get_tensor_and_context_parallel_group().rank() == 0
        contributes = parallel_state.is_pipeline_last_stage() and first
        stats = LossStats.merge(parts if contributes else [], device)
        own = gaps if contributes else OriginGaps.zeros(self._buckets, device)
        sums_K, maxima_M = stats.sum_vector(), stats.max_vector()
        sums, maxima = torch.cat([sums_K, own.sums_BK.flatten()]), torch.cat([maxima_M, own.maxima_B])
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        sums, maxima = sums.cpu(), maxima.cpu()
        reduced = LossStats.from_vectors(sums[: sums_K.numel()], maxima[: maxima_M.numel()])
        self.source_gaps = OriginGaps.from_vectors(sums[sums_K.numel() :], maxima[maxima_M.numel() :])
        return self._objective.report(reduced)
