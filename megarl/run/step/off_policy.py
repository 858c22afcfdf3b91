"""Tokens of other weights, before an update: masks that take tokens out, and the interpolated proximal policy.

Shapes: `_R` the response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megarl.algorithms.correction.apply import importance_weights, interpolation
from megarl.algorithms.objective.stats import LossStats
from megarl.algorithms.objective.terms import term_mask
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.derived.logprob_passes import rejection_of
from megarl.config.schema import Config
from megarl.queue.streams import OLD_LOGPROBS, PROXIMAL_ALPHA, ROLLOUT_LOGPROBS
from megarl.queue.trajectory import Trajectory
from megarl.run.step.update_metrics import record_correction
from megarl.telemetry.metrics.registry import StepMetrics
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample

_VECTORS: Codec[tuple[list[float], list[float]]] = codec_of(tuple[list[float], list[float]])
_LENGTHS: Codec[dict[str, int]] = codec_of(dict[str, int])


def _encode_stats(stats: LossStats) -> bytes:
    return _VECTORS.encode((stats.sum_vector().tolist(), stats.max_vector().tolist()))


def _decode_stats(content: bytes) -> LossStats:
    sums_K, maxima_M = (torch.tensor(part, dtype=torch.float64) for part in _VECTORS.decode(content))
    return LossStats.from_vectors(sums_K, maxima_M)


STATS = Codec(_encode_stats, _decode_stats)


def reject_before_updates(
    samples: Mapping[str, TrainSample], config: Config, metrics: StepMetrics
) -> dict[str, int] | None:
    """Take the tokens that the masks leave out from the loss masks of this replica's samples. Collective.

    Returns the number of tokens that each sample of any replica still trains; None if no masks act before the updates
    (`algorithm.correction.denominator: trained`). Records `correction/*` over every token that was trained before. The
    samples must have the trainer's log-probs.
    """
    correction = rejection_of(config)
    if correction is None:
        return None
    parts, own = [LossStats.zeros()], {}
    for key, sample in samples.items():
        proximal_R, sampling_R = sample.streams[OLD_LOGPROBS], sample.streams[ROLLOUT_LOGPROBS]
        trained_R = torch.ones_like(proximal_R, dtype=torch.bool) if sample.loss_mask_R is None else sample.loss_mask_R
        cuts = torch.tensor([0, proximal_R.numel()], dtype=torch.int32)
        judged_R = term_mask("rl", trained_R.bool(), sample.streams)  # not demonstrations, for example
        weights = importance_weights(proximal_R, sampling_R, judged_R, correction, cu_seqlens=cuts)
        stats = LossStats.of_pair(sampling_R, proximal_R, judged_R, cuts)
        stats.add_correction(weights, stats)
        parts.append(stats)
        sample.loss_mask_R = trained_R & ~weights.rejected  # only judged tokens are rejected
        own[key] = sample.trained_tokens
    numbers = LossStats.merge(parallel.dp_all_gather_object(LossStats.merge(parts), STATS))
    record_correction(metrics, numbers.means() | numbers.correction_means(), correction)
    return {key: value for part in parallel.dp_all_gather_object(own, _LENGTHS) for key, value in part.items()}


def set_interpolation(
    samples: Sequence[TrainSample], rows: Mapping[str, Trajectory], *, version: int, updates: int
) -> None:
    """Give the samples of an update the stream `proximal_alpha`.

    `version`: that of the weights before the first update of the step; `updates`: made since then.
    """
    for sample in samples:
        sample.streams[PROXIMAL_ALPHA] = interpolation(token_lags(rows[sample.key], version), updates)


def token_lags(row: Trajectory, version: int) -> list[int]:
    """Return, of each response token, the number of updates from the weights that sampled it to those of `version`.

    0 for tokens that the model did not sample.
    """
    lags = [0] * len(row.response_ids)
    for span in row.versions:
        lags[span.start : span.end] = [version - span.counts_as] * (span.end - span.start)
    return [lag if sampled else 0 for lag, sampled in zip(lags, row.response_mask, strict=True)]
