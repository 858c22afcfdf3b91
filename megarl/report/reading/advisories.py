"""Advice on a run, computed from its series. Pure."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.report.reading.metrics_file import (
    NO_SIGNAL,
    ROLLOUT_IDLE,
    ROLLOUT_TIME,
    TRAINER_WAIT,
    RunMetrics,
)


@dataclass(frozen=True)
class Sides:
    """Measurements of both sides of a run. Seconds are per step; on a CPU, GPUs are processes.

    `trainer_fixed_s`: the trainer's time that does not depend on its GPUs: weight sync, saves, the loop. `trainer_s`:
    passes and updates. `rollout_s`: time in which engines ran. `trainer_unit`, `rollout_unit`: each side changes in
    steps of so many GPUs, those of one model-parallel replica. `in_turn`: each side waits while the other works.
    """

    trainer_gpus: int
    rollout_gpus: int
    trainer_unit: int
    rollout_unit: int
    trainer_fixed_s: float
    trainer_s: float
    rollout_s: float
    in_turn: bool = False

    def step_s(self, trainer_gpus: int, rollout_gpus: int) -> float:
        """Return the length of a step with other numbers of GPUs, if both sides scale with theirs."""
        trainer = self.trainer_fixed_s + self.trainer_s * self.trainer_gpus / trainer_gpus
        rollout = self.rollout_s * self.rollout_gpus / rollout_gpus
        return trainer + rollout if self.in_turn else max(trainer, rollout)


@dataclass(frozen=True)
class Split:
    """A split of the same number of GPUs. `step_share`: the length of its step relative to the current one."""

    trainer_gpus: int
    rollout_gpus: int
    step_share: float


def best_split(sides: Sides) -> Split | None:
    """Return the split with the shortest step; None if none is at least 3% shorter than the current one.

    It uses all GPUs, or fewer if units do not divide them.
    """
    total = sides.trainer_gpus + sides.rollout_gpus
    now = sides.step_s(sides.trainer_gpus, sides.rollout_gpus)
    best: Split | None = None
    for trainer in range(sides.trainer_unit, total - sides.rollout_unit + 1, sides.trainer_unit):
        rollout = (total - trainer) // sides.rollout_unit * sides.rollout_unit
        share = sides.step_s(trainer, rollout) / now if now else 1.0
        if best is None or share < best.step_share:
            best = Split(trainer, rollout, share)
    return best if best is not None and best.step_share < 0.97 else None


ABORTED, NO_SIGNAL_SHARE, TRUNCATED, IDLE = 0.05, 0.50, 0.25, 0.30
SLOW_REPLICA = 0.5  # of the median of all engines
LAST = 0.1  # share of the steps that counts as recent
LISTED_SPIKES = 5


_Windows = Sequence[tuple[float, str]]  # shares of the steps, from the end, to judge in turn, and words for them


@dataclass(frozen=True)
class Advisory:
    """Something to look at: a measurement, and what to do."""

    key: str
    title: str
    text: str


@dataclass(frozen=True)
class GpuLayout:
    """The GPUs of a run by its config; on a CPU, its processes (`unit`: the word for either).

    `shared`: both sides take turns on the same GPUs, so each waits for the other, and none can be moved.
    """

    trainer_gpus: int
    trainer_unit: int
    replicas: int
    replica_gpus: int
    synchronous: bool
    unit: str = "GPUs"
    shared: bool = False


def advise(metrics: RunMetrics, layout: GpuLayout | None, when: str = "over the whole run") -> list[Advisory]:
    """Return the advice on a run, the most general first; none for a run without steps.

    `when`: the words for the steps of `metrics`.
    """
    if not metrics.steps:
        return []
    windows = ((1.0, when), (LAST, f"over the last {LAST:.0%} of the steps"))
    idle = () if layout is not None and layout.shared else _idle(metrics, layout, windows)
    return [*idle, *_shares(metrics, windows), *_slow_replicas(metrics), *_spikes(metrics)]


def trainer_idle(metrics: RunMetrics, last: float = 1.0) -> float:
    """Return the share of the steps' time in which the trainer waited for rollouts."""
    return metrics.ratio(TRAINER_WAIT, "time/step", last)


def rollout_idle(metrics: RunMetrics, last: float = 1.0) -> float:
    """Return the share of the steps' time in which no engine ran."""
    return metrics.ratio(ROLLOUT_IDLE, ROLLOUT_TIME, last)


def _over(share: Callable[[float], float], bound: float, windows: _Windows) -> tuple[float, str] | None:
    """Return the share of the first window above a bound, and the window's words; None if there is none."""
    for last, when in windows:
        if (value := share(last)) > bound:
            return value, when
    return None


_SHARES = (
    (
        "aborted", "rollout/aborted_share", ABORTED, "{value:.0%} of the responses were aborted",
        "Engines dropped them: see the failures in the samples, the logs of the replicas, and timeouts.generate_s.",
    ),
    (
        "no_signal", NO_SIGNAL, NO_SIGNAL_SHARE, "{value:.0%} of the prompt groups had no signal",
        "All their samples had the same reward, so they teach nothing. Use easier or harder prompts "
        "(data.curriculum), more samples per group (batch.samples_per_group), or have such groups replaced "
        "(admission.refill).",
    ),
    (
        "truncated", "rollout/truncated_share", TRUNCATED, "{value:.0%} of the responses were cut at the token limit",
        "Raise sampling.max_tokens, penalize length before the limit (algorithm.overlong), or leave them out of the "
        "loss (sampling.truncated: mask).",
    ),
)  # fmt: skip


def _shares(metrics: RunMetrics, windows: _Windows) -> Iterator[Advisory]:
    for key, name, bound, title, advice in _SHARES:
        if (over := _over(partial(metrics.average, name), bound, windows)) is not None:
            value, when = over
            yield Advisory(key, f"{title.format(value=value)} {when}", advice)


def _idle(metrics: RunMetrics, layout: GpuLayout | None, windows: _Windows) -> Iterator[Advisory]:
    for last, when in windows:
        trainer, rollout = trainer_idle(metrics, last), rollout_idle(metrics, last)
        if trainer > IDLE or rollout > IDLE:
            yield _of_idle(trainer, rollout, when, layout, sides_of(metrics, layout, last) if layout else None)
            return


def _of_idle(trainer: float, rollout: float, when: str, layout: GpuLayout | None, sides: Sides | None) -> Advisory:
    """Return the advice on the idle shares of both sides, at least one of which is above its bound."""
    waits = (
        f"the trainer waited for rollouts {trainer:.0%} of its time",
        f"the engines had no work for {rollout:.0%} of the time",
    )
    said = " and ".join(wait for wait, share in zip(waits, (trainer, rollout), strict=True) if share > IDLE)
    title = f"{said[0].upper()}{said[1:]}, {when}"
    unit = layout.unit if layout is not None else "GPUs"
    ahead = "Let generation run ahead of training (admission.mode: one_step_off, stream or async)."
    if layout is not None and layout.synchronous:
        text = f"The two sides run in turn. {ahead} As long as they run in turn: {_split_text(sides, unit)}"
        return Advisory("both_idle", title, text)
    if trainer > IDLE and rollout > IDLE:
        text = f"The two sides wait for each other, which another split of the {unit} does not change."
        further = "Let generation run further ahead of training (admission.max_staleness)."
        return Advisory("both_idle", title, f"{text} {ahead if layout is None else further}")
    if trainer > IDLE:
        return Advisory("trainer_idle", title, f"Rollout is the slower side. {_split_text(sides, unit)}")
    slower = "Training is the slower side, or the bound on staleness holds generation back."
    return Advisory("rollout_idle", title, f"{slower} {_split_text(sides, unit)}")


def sides_of(metrics: RunMetrics, layout: GpuLayout, last: float = 1.0) -> Sides | None:
    """Return the measurements of both sides over the last share of the steps; None without times."""
    step = metrics.average("time/step", last)
    if not step > 0:
        return None
    passes = sum(_or_zero(metrics.average(f"time/{phase}", last)) for phase in ("logprobs", "update"))
    waits = sum(_or_zero(metrics.average(f"time/{phase}", last)) for phase in ("generate", "drain"))
    # The engines' idle share refers to the time between two batches, which is a step on average.
    busy = 1.0 - _or_zero(rollout_idle(metrics, last))
    return Sides(
        layout.trainer_gpus, layout.replicas * layout.replica_gpus, layout.trainer_unit, layout.replica_gpus,
        max(0.0, step - passes - waits), passes, busy * step, layout.synchronous,
    )  # fmt: skip


def _split_text(sides: Sides | None, unit: str) -> str:
    if sides is None:
        return "The run's config is missing, so no split of the GPUs can be computed."
    now = f"{sides.trainer_gpus} for the trainer and {sides.rollout_gpus} for rollout"
    better = best_split(sides)
    if better is None:
        return f"The current split ({now}) is within 3% of the best one."
    return (
        f"Now {now}. With {better.trainer_gpus} and {better.rollout_gpus} (rollout.replicas: "
        f"{better.rollout_gpus // sides.rollout_unit}) a step would take about {better.step_share:.0%} of its current "
        f"time, if both sides scale with their {unit}."
    )


def _slow_replicas(metrics: RunMetrics) -> Iterator[Advisory]:
    rates = replica_rates(metrics)
    if len(rates) < 2:
        return
    usual = statistics.median(rates.values())
    slow = {name: rate for name, rate in rates.items() if rate < SLOW_REPLICA * usual}
    if slow:
        listed = ", ".join(
            f"replica {name}: {rate:,.0f}" for name, rate in sorted(slow.items(), key=lambda x: x[1])[:8]
        )
        yield Advisory(
            "slow_replica",
            f"{len(slow)} of {len(rates)} engines made less than {SLOW_REPLICA:.0%} of the usual tokens per second",
            f"Usual is {usual:,.0f} tokens/s; {listed}. See the log of the replica, and its node with megarl doctor; "
            "megarl pool can drain and replace it.",
        )


def replica_rates(metrics: RunMetrics) -> dict[str, float]:
    """Return the mean tokens per second of each replica, by index, over the steps in which it had work."""
    prefix = "rollout/replica_tokens_per_second/"
    return {name[len(prefix) :]: metrics.average(name) for name in metrics.family(prefix)}


def _spikes(metrics: RunMetrics) -> Iterator[Advisory]:
    if not metrics.spikes:
        return
    longest, *others = (
        f"time/{each.phase} took {_seconds(each.seconds)} in step {each.step} (median: {_seconds(each.median)})"
        for each in metrics.spikes
    )
    listed = f"Also {'; '.join(others[:LISTED_SPIKES])}" if others else ""
    more = len(others) - LISTED_SPIKES
    yield Advisory(
        "spike",
        longest if not others else f"{len(others) + 1} steps took far longer than usual: {longest}",
        f"{listed}{f'; and {more} more' if more > 0 else ''}{'. ' if others else ''}The events of such a step (megarl "
        "trace) and the logs show what was slow.",
    )


def _seconds(value: float) -> str:
    if value < 1e-3:
        return "less than 1 ms"
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
