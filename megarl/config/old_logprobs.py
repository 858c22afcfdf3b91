"""Resolves `auto` in `algorithm.correction` and `algorithm.old_logprobs`."""

from __future__ import annotations

from megarl.algorithms.correction import CorrectionSpec
from megarl.config.pace import pace_of
from megarl.config.schema import Config


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
