"""Resolves `auto` in `algorithm.correction`, and tells which log-prob passes a step needs and when they may be made."""

from __future__ import annotations

from megarl.algorithms.correction import CorrectionSpec
from megarl.config.pace import pace_of
from megarl.config.schema import Config
from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS


def correction_of(config: Config) -> CorrectionSpec | None:
    """Return the correction of the policy loss; None for none.

    `auto` is none where groups are generated for the next step only: the staleness inside a step of several updates
    is what PPO's own ratio corrects.
    """
    section = config.algorithm.correction
    if section.kind == "none" or (section.kind == "auto" and not pace_of(config).runs_ahead):
        return None
    return CorrectionSpec("token_tis", section.cap)


def recomputes_old_logprobs(config: Config) -> bool:
    """Tell whether the trainer computes the old log-probs in a pass of its own before the updates of a step.

    With a correction they are those of the weights before the first update. If there is only one, its own forward pass
    gives them.
    """
    if config.algorithm.old_logprobs == "trainer":
        return True
    return correction_of(config) is not None and config.trainer.mini_batches > 1


def logprob_passes(config: Config) -> list[str]:
    """Return the streams of which each is computed in a pass of its own before the updates of a step, in order."""
    old = [OLD_LOGPROBS] if recomputes_old_logprobs(config) else []
    return old + ([REFERENCE_LOGPROBS] if config.needs_reference else [])


def computes_logprobs_early(config: Config) -> bool:
    """Tell whether log-prob passes are made while the trainer waits for a batch.

    How samples are packed then depends on the order in which groups finish, and with it the last bits of the
    log-probs. So they are not in runs that can be repeated, or replayed from their recorded batches, bit for bit.
    """
    exact = config.run.deterministic or config.telemetry.dump_batches
    return config.trainer.idle_logprobs and not exact and bool(logprob_passes(config))
