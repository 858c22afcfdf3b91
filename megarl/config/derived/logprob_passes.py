"""Resolves `auto` in `algorithm.correction`, and lists the log-prob passes of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.algorithms.correction.config import CorrectionConfig, CorrectionSpec, section_problems
from megarl.config.derived.staleness import pace_of
from megarl.config.derived.teachers import teachers_by_set, trainer_teachers
from megarl.config.schema import Config
from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS


def correction_of(config: Config) -> CorrectionSpec | None:
    """Return the correction inside the policy loss; None for none.

    `auto` is none if groups are generated for the next step only: PPO's ratio corrects the staleness inside a step of
    several updates. Masks always give a correction, perhaps without a weight. It holds the masks whose tokens are
    counted; others are applied before the updates (`rejection_of`).
    """
    section = config.algorithm.correction
    correction = _whole_correction(section, pace_of(config).runs_ahead)
    if correction is None or section.denominator == "trained":
        return correction
    return replace(correction, masks=())


def rejection_of(config: Config) -> CorrectionSpec | None:
    """Return the correction whose masks remove tokens from the samples before the updates; None for none."""
    section = config.algorithm.correction
    return _whole_correction(section, pace_of(config).runs_ahead) if _rejects_before_updates(section) else None


def _whole_correction(section: CorrectionConfig, runs_ahead: bool) -> CorrectionSpec | None:
    kind = section.kind
    if kind == "auto":
        kind = "token_tis" if runs_ahead else "none"
    if kind == "none" and not section.masks:
        return None
    return CorrectionSpec(kind, section.cap, section.low, section.high, tuple(section.masks), section.proximal)


def _rejects_before_updates(correction: CorrectionConfig) -> bool:
    return correction.denominator == "kept" and bool(correction.masks)


def interpolates_proximal(correction: CorrectionSpec | None) -> bool:
    """Return whether the proximal policy's log-probs are interpolated inside each update."""
    return correction is not None and correction.proximal == "loglinear"


def correction_problems(config: Config) -> Iterator[str]:
    """Yield the problems of `algorithm.correction`, also with `algorithm.old_logprobs`."""
    section = config.algorithm.correction
    yield from section_problems(section)
    if section.proximal == "loglinear":
        key = "algorithm.correction.proximal: loglinear"
        if correction_of(config) is None:
            yield f"{key} is for a correction, and there is none; set algorithm.correction.kind, or remove it"
        elif config.algorithm.old_logprobs == "trainer":
            yield (
                f"{key} saves the log-prob pass that algorithm.old_logprobs: trainer asks for; set one of them to its "
                "default"
            )


def recomputes_old_logprobs(config: Config) -> bool:
    """Return whether the trainer computes the old log-probs in a separate pass before a step's updates.

    With a correction they are those of the weights before the first update. A single update gets them from its forward
    pass, unless masks must be known before.
    """
    if config.algorithm.old_logprobs == "trainer" or _rejects_before_updates(config.algorithm.correction):
        return True
    correction = correction_of(config)
    return correction is not None and not interpolates_proximal(correction) and config.trainer.mini_batches > 1


def logprob_passes(config: Config) -> list[str]:
    """Return the streams that are each computed in a separate pass before a step's updates, in order."""
    old = [OLD_LOGPROBS] if recomputes_old_logprobs(config) else []
    return old + ([REFERENCE_LOGPROBS] if config.needs_reference else [])


@dataclass(frozen=True)
class TeacherPass:
    """A trainer pass over the samples of some data sets, for one teacher's log-probs."""

    teacher: str
    datasets: frozenset[str]


def teacher_passes(config: Config) -> list[TeacherPass]:
    """Return the passes of the teachers on the trainer's ranks, in order."""
    by_set = teachers_by_set(config).items()
    return [
        TeacherPass(each.name, frozenset(name for name, own in by_set if own == each))
        for each in trainer_teachers(config.teachers)
    ]
