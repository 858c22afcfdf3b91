"""The training loss of a config: its terms, the streams that they need, and the default weights of a row's tokens."""

from typing import Any

from megarl.algorithms.objective.objective import Objective
from megarl.config.derived.algorithm import loss_of
from megarl.config.derived.logprob_passes import correction_of, interpolates_proximal, recomputes_old_logprobs
from megarl.config.derived.teachers import distils_in_loss, teachers_by_set
from megarl.config.schema import Config
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.queue.streams import (
    ADVANTAGES,
    CE_WEIGHTS,
    OLD_LOGPROBS,
    PROXIMAL_ALPHA,
    REF_KL_WEIGHTS,
    RL_WEIGHTS,
    ROLLOUT_LOGPROBS,
    TEACHER_LOGPROBS,
)
from megarl.queue.trajectory import Trajectory


def objective_of(config: Config) -> Objective:
    """Return the loss of the section `algorithm`. Raises ConfigError if it is invalid."""
    algorithm = config.algorithm
    return Objective(
        loss=loss_of(algorithm),
        aggregation=algorithm.aggregation,
        ce_coef=algorithm.ce.coef,
        entropy_coef=algorithm.entropy_coef,
        correction=correction_of(config),
        **_ref_kl(algorithm, distils_in_loss(config.teachers, algorithm.distill)),
    )


def _ref_kl(algorithm: AlgorithmConfig, distils: bool) -> dict[str, Any]:
    """Return coefficient, estimator and stream of the term `ref_kl`: the teacher's log-probs, or the reference's."""
    if distils:
        distill = algorithm.distill
        return {
            "kl_coef": distill.coef, "kl_estimator": distill.estimator, "reference_stream": TEACHER_LOGPROBS
        }  # fmt: skip
    coef = algorithm.kl.coef if algorithm.kl.where == "loss" else 0.0
    return {"kl_coef": coef, "kl_estimator": algorithm.kl.estimator}


def needed_streams(config: Config, objective: Objective) -> list[str]:
    """Return the streams without which the configured loss would fail or be a different one."""
    return [
        ADVANTAGES,
        *([OLD_LOGPROBS] if objective.correction is None or recomputes_old_logprobs(config) else []),
        *([ROLLOUT_LOGPROBS] if objective.correction else []),
        *([PROXIMAL_ALPHA] if interpolates_proximal(objective.correction) else []),
        *([objective.reference_stream] if objective.kl_coef else []),
    ]


def default_weights(config: Config, row: Trajectory) -> dict[str, list[float]]:
    """Return the config's token weights for a row without its own, by stream.

    A demonstration is only in `ce`. With distillation in the loss, a row without a teacher is not in `ref_kl`.
    """
    tokens = len(row.response_ids)
    if row.demonstrated:
        return {CE_WEIGHTS: [1.0] * tokens, RL_WEIGHTS: [0.0] * tokens, REF_KL_WEIGHTS: [0.0] * tokens}
    found: dict[str, list[float]] = {}
    chosen = _CE_TOKENS[config.algorithm.ce.tokens]
    if chosen and CE_WEIGHTS not in row.streams:
        found[CE_WEIGHTS] = [float(sampled in chosen) for sampled in row.response_mask]
    distils = distils_in_loss(config.teachers, config.algorithm.distill)
    if distils and REF_KL_WEIGHTS not in row.streams and row.dataset not in teachers_by_set(config):
        found[REF_KL_WEIGHTS] = [0.0] * tokens
    return found


# The response mask values that `algorithm.ce.tokens` selects.
_CE_TOKENS = {"none": (), "observations": (0,), "sampled": (1,), "all": (0, 1)}
