"""Tells whether evaluations go on beside training, and lists what is wrong with the section `evaluation`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config


def evaluates_beside_training(config: Config) -> bool:
    """Tell whether the trainer goes on while an evaluation runs.

    By default it does where generation runs ahead of training: engines generate while the trainer works anyway, and
    would otherwise fill the queue and stand still while it waits for the evaluation. A synchronous run keeps evaluating
    between two steps, with all engines and exactly one version, as do runs that need that.
    """
    if config.evaluation.concurrent is not None:
        return config.evaluation.concurrent
    return pace_of(config).runs_ahead and not any(_needs_one_version(config))


def evaluation_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the section `evaluation`, each with its fix."""
    section = config.evaluation
    if section.every and not section.sets:
        yield "evaluation.every: set, but evaluation.sets is empty; add a set or set it to 0"
    if section.concurrent:
        yield from (f"evaluation.concurrent: {reason}; remove one of them" for reason in _needs_one_version(config))


def _needs_one_version(config: Config) -> Iterator[str]:
    """Yield the reasons why this run must evaluate between two steps."""
    if config.checkpoint.keep_best is not None:
        yield "checkpoint.keep_best compares checkpoints by an evaluation that has ended when they are saved"
    if config.run.deterministic:
        yield "run.deterministic needs the same engine steps in each run, which an evaluation beside training changes"
