"""The numbers behind the modes of the `admission` section: how far generation may run ahead of training.

All numbers count optimizer updates, and so does the version of the policy's weights: each step advances it by
`trainer.mini_batches`, even if it makes fewer updates because groups were filtered or samples masked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.schema import DEFAULT_INTERVAL, DEFAULT_QUOTA, AdmissionConfig, Config, RunConfig
from megarl.config.schema.data import EvaluationConfig
from megarl.config.schema.job import CheckpointConfig


@dataclass(frozen=True)
class Pace:
    """The relation of generation to training.

    `updates_per_step`: optimizer updates per step (>= 1), by which a step advances the version. `sync_interval`:
    updates between publications of the weights, a multiple of `updates_per_step`. `max_staleness`: the most updates
    between the weights of a trajectory's oldest token and the update that trains it. `in_turns`: engines generate while
    the trainer waits, and nothing for steps after the next publication.
    """

    updates_per_step: int = 1
    sync_interval: int = 1
    max_staleness: int = 0
    in_turns: bool = False

    def __post_init__(self) -> None:
        if self.updates_per_step < 1 or self.sync_interval < 1 or self.sync_interval % self.updates_per_step:
            raise ValueError(f"sync_interval must be a positive multiple of updates_per_step: {self!r}")
        # Otherwise nothing could be generated for the last step before a publication: the run would wait forever.
        if self.max_staleness < self.sync_interval - 1:
            raise ValueError(f"max_staleness must be at least sync_interval - 1: {self!r}")

    def __str__(self) -> str:
        """Return as text when weights are published and how old tokens may get."""
        every, oldest = (f"{n} update{'s' * (n != 1)}" for n in (self.sync_interval, self.max_staleness))
        return f"publishes every {every.removeprefix('1 ')}, tokens at most {oldest} old"

    @property
    def runs_ahead(self) -> bool:
        """True if groups are generated before an earlier step has trained."""
        return self.steps_within_bound(0) >= 2

    @property
    def overlaps(self) -> bool:
        """True if groups are generated while a step trains."""
        return self.runs_ahead and not self.in_turns

    @property
    def steps_per_publication(self) -> int:
        """The number of steps from one publication to the next."""
        return self.sync_interval // self.updates_per_step

    def steps_within_bound(self, updates: int) -> int:
        """Return how many steps may contain a token sampled after `updates` updates.

        The last update of the n-th step follows n * `updates_per_step` - 1 updates.
        """
        return (updates + self.max_staleness + 1) // self.updates_per_step

    def publishes_after(self, steps_done: int) -> bool:
        """Return whether the weights are published after the first `steps_done` steps."""
        return steps_done * self.updates_per_step % self.sync_interval == 0

    def next_publication(self, steps_done: int) -> int:
        """Return after how many steps the weights are published next, when `steps_done` are trained."""
        return (steps_done // self.steps_per_publication + 1) * self.steps_per_publication


def pace_of(config: Config) -> Pace:
    """Return the numbers of the config's mode. Raises ValueError for a config that `pace_problems` refuses."""
    updates = config.trainer.mini_batches
    interval = _sync_interval(config.admission, updates)
    bound = config.admission.max_staleness
    if bound is None:
        ahead = {
            "sync": 0,
            "one_step_off": updates,
            "stream": 0,
            "async": max(math.ceil(DEFAULT_QUOTA * interval), updates),
        }[config.admission.mode]
        bound = interval - 1 + ahead
    return Pace(updates, interval, bound, config.rollout.share_gpus)


REFILL_LIMIT = 10  # the most groups that are replaced per step, in multiples of those of a step


def refill_groups(config: Config) -> int:
    """Return how many groups without signal rollout may replace before a step; 0 without dynamic sampling.

    If all steps up to a publication are generated before the first is taken, it is for all of them.
    """
    if not config.admission.refill:
        return 0
    pace = pace_of(config)
    return REFILL_LIMIT * config.batch.groups * (pace.steps_per_publication if pace.in_turns else 1)


def _sync_interval(section: AdmissionConfig, updates: int) -> int:
    if section.sync_interval is not None:
        return section.sync_interval
    if section.mode in ("sync", "one_step_off"):
        return updates
    least = 2 if section.mode == "stream" else 1  # with one step per publication, stream would be sync
    return max(math.ceil(DEFAULT_INTERVAL / updates), least) * updates


def pace_notes(config: Config) -> Iterator[str]:
    """Yield notes for the user on the section `admission` of a valid config."""
    pace, updates = pace_of(config), config.trainer.mini_batches
    if config.run.deterministic and pace.overlaps:
        yield (
            f"run.deterministic: with admission.mode: {config.admission.mode} a run is not reproducible, because "
            f"groups generated ahead depend on timing, and it keeps no journal, so a resume generates all groups "
            f"again that no checkpoint has; use mode: sync, or remove it"
        )
    if config.admission.mode != "sync" and not pace.runs_ahead:
        yield (
            f"admission.mode: {config.admission.mode} generates nothing ahead, because a step makes {updates} updates "
            f"and max_staleness is {pace.max_staleness}: generation and training take turns; for more, set "
            f"admission.max_staleness to at least {2 * updates - 1}"
            + (f" and admission.sync_interval to at least {2 * updates}" if config.admission.mode == "stream" else "")
        )
    if (made := config.run.steps * updates) < pace.sync_interval:
        yield (
            f"admission.sync_interval: {pace.sync_interval} updates are more than the {made} of the whole run "
            "(run.steps), which trains on tokens of the first weights only; lower it to see the weights change"
        )
    uses = config.admission.max_uses
    if uses > 1 and pace.steps_within_bound(0) < 2 * uses:
        yield (
            f"admission.max_uses: with {uses} uses within max_staleness {pace.max_staleness}, fewer groups than two "
            f"steps train are generated at a time, and engines may have nothing to do; for more, set "
            f"admission.max_staleness to at least {2 * uses * updates - 1} (mode: async)"
        )


def pace_problems(config: Config) -> Iterator[str]:
    """Yield the problems of the section `admission`."""
    section, updates = config.admission, config.trainer.mini_batches
    interval = _sync_interval(section, updates)
    if interval % updates:
        yield (
            f"admission.sync_interval: {interval} updates are no whole number of steps of "
            f"trainer.mini_batches={updates} updates; use a multiple of {updates}"
        )
        return
    bound = section.max_staleness
    if bound is not None and bound < interval - 1:
        yield (
            f"admission.max_staleness: {bound} is below {interval - 1}, the staleness of the last of the {interval} "
            f"updates before a publication; set it to at least {interval - 1} or lower admission.sync_interval"
        )
        return
    pace = pace_of(config)
    if section.mode == "sync" and (pace.sync_interval, pace.max_staleness) != (updates, updates - 1):
        yield (
            f"admission.mode: sync publishes after every step ({updates} updates) and generates nothing ahead "
            f"(max_staleness {updates - 1}); use mode: async with these values, or remove them"
        )
    if section.mode == "one_step_off" and (pace.sync_interval, pace.max_staleness) != (updates, 2 * updates - 1):
        yield (
            f"admission.mode: one_step_off publishes after every step ({updates} updates) and generates one step "
            f"ahead (max_staleness {2 * updates - 1}); use mode: async with these values, or remove them"
        )
    if section.mode == "stream" and pace.max_staleness != pace.sync_interval - 1:
        yield (
            f"admission.mode: stream generates nothing ahead of the next publication (max_staleness "
            f"{pace.sync_interval - 1}); use mode: async with max_staleness {pace.max_staleness}, or remove it"
        )
    if section.max_uses > (steps := pace.steps_within_bound(0)):
        yield (
            f"admission.max_uses: {section.max_uses} steps cannot train one group, because max_staleness "
            f"{pace.max_staleness} leaves each group at most {steps} step(s) of {updates} update(s); use mode: async "
            f"with max_staleness of at least {section.max_uses * updates - 1}, or set max_uses to at most {steps}"
        )


# Of `timeouts.generate_s`, after which a trainer that has waited for a group from its start gives up. The rest is for
# agent loops, rewards and the queue.
DEFAULT_SHARE = 0.9


def group_deadline_s(config: Config) -> float | None:
    """Return the seconds from a prompt group's start to its deadline; None if it has none.

    By default groups have one if generation runs ahead: otherwise a straggler that began long before could hold up the
    trainer for the maximum time of a response.
    """
    rollout = config.rollout
    if rollout.on_group_deadline == "finish":
        return None
    if rollout.group_deadline_s is None and pace_of(config).runs_ahead:
        return DEFAULT_SHARE * config.timeouts.generate_s
    return rollout.group_deadline_s


def evaluates_alongside_training(config: Config) -> bool:
    """Return whether the trainer continues during an evaluation.

    By default it does if engines generate while the trainer works: otherwise they would fill the queue and then idle
    until the evaluation ends. Other runs, and those that need it, evaluate between two steps, with all engines and
    exactly one version.
    """
    if config.evaluation.concurrent is not None:
        return config.evaluation.concurrent
    return pace_of(config).overlaps and not any(_needs_one_version(config.checkpoint, config.run))


def evaluation_problems(section: EvaluationConfig, checkpoint: CheckpointConfig, run: RunConfig) -> Iterator[str]:
    """Yield the problems of the section `evaluation`."""
    if section.every and not section.sets:
        yield "evaluation.every: set, but evaluation.sets is empty; add a set or set it to 0"
    if section.concurrent:
        yield from (
            f"evaluation.concurrent: {reason}; remove one of them" for reason in _needs_one_version(checkpoint, run)
        )


def _needs_one_version(checkpoint: CheckpointConfig, run: RunConfig) -> Iterator[str]:
    """Yield why this run must evaluate between two steps."""
    if checkpoint.keep_best is not None:
        yield "checkpoint.keep_best compares checkpoints by an evaluation that has ended when they are saved"
    if run.deterministic:
        yield "run.deterministic needs the same engine steps in each run, which an evaluation during training changes"
