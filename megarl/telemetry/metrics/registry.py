"""The declaration of a metric, the registry that refuses undeclared names, and the collector of a step's values.

A reducer combines the values recorded under one name during a step (by mini-batches, ranks, groups, ...) into one
number. It is declared and never derived from the name.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Reducer = Literal["sum", "mean", "max", "min", "last", "weighted"]

MOST_MATCHED = 4096  # cached names of templates; more than a run's replicas and lags have


class UndeclaredMetricError(KeyError):
    """A metric was recorded under a name that `declarations/` does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric.

    `name` may contain `{placeholders}`, each for one name without a slash (`eval/{set}/greedy`). `timing` marks a
    metric that depends on the clock or the machine, and `faults` one that counts failures around the run (kills, lost
    engines, full disks); all others are reproducible bit for bit in a deterministic run.
    """

    name: str
    unit: str
    reducer: Reducer
    meaning: str
    timing: bool = False
    faults: bool = False

    @property
    def reproducible(self) -> bool:
        """True if a deterministic run repeats the metric bit for bit, whatever happens to its processes."""
        return not (self.timing or self.faults)

    @property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of the names that this declaration covers."""
        pieces = re.split(r"\{\w+\}", self.name)
        return re.compile("[^/]+".join(re.escape(piece) for piece in pieces))


class Registry:
    """All declared metrics, in the order of the documentation."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._exact: dict[str, Metric] = {}
        self._templates: list[tuple[re.Pattern[str], Metric]] = []
        self._match = lru_cache(MOST_MATCHED)(self._template_of)  # every step has the same names
        for metric in metrics:
            if metric.name in self._exact or any(metric.name == other.name for _, other in self._templates):
                raise ValueError(f"metric {metric.name!r} is declared twice")
            if "{" in metric.name:
                self._templates.append((metric.pattern, metric))
            else:
                self._exact[metric.name] = metric

    def __iter__(self) -> Iterator[Metric]:
        yield from self._exact.values()
        yield from (metric for _, metric in self._templates)

    def lookup(self, name: str) -> Metric:
        """Return the declaration of `name`; raises UndeclaredMetricError, which suggests similar names."""
        metric = self._exact.get(name) or self._match(name)
        if metric is None:
            near = difflib.get_close_matches(name, self._exact, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UndeclaredMetricError(
                f"metric {name!r} is not declared{hint} (declare it in megarl/telemetry/metrics/declarations/)"
            )
        return metric

    def _template_of(self, name: str) -> Metric | None:
        return next((metric for pattern, metric in self._templates if pattern.fullmatch(name)), None)


class StepMetrics:
    """Collects the values of one step and reduces those of each name by its declared reducer."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._values: dict[str, list[tuple[float, float]]] = {}

    def record(self, name: str, value: float, weight: float | None = None) -> None:
        """Record one value; a name may be recorded any number of times in a step.

        Raises UndeclaredMetricError for an unknown name, and ValueError unless a weight is given exactly for the
        reducer `weighted`.
        """
        reducer = self._registry.lookup(name).reducer
        if (weight is not None) != (reducer == "weighted"):
            need = "needs a weight" if weight is None else f"takes no weight: its reducer is {reducer}"
            raise ValueError(f"metric {name!r} {need}")
        self._values.setdefault(name, []).append((float(value), 1.0 if weight is None else float(weight)))

    def update(self, values: Mapping[str, float], prefix: str = "", weight: float | None = None) -> None:
        """Record every item of `values` under `prefix + key`; `weight` is used for the reducer `weighted` only."""
        for key, value in values.items():
            weighted = self._registry.lookup(prefix + key).reducer == "weighted"
            self.record(prefix + key, value, weight if weighted else None)

    def reduce(self) -> dict[str, float]:
        """Return name -> reduced value, in the order of first recording, and clear the collector."""
        reduced = {name: reduce(self._registry.lookup(name).reducer, pairs) for name, pairs in self._values.items()}
        self._values = {}
        return reduced


def reduce(reducer: Reducer, pairs: list[tuple[float, float]]) -> float:
    """Reduce one or more (value, weight) pairs to one number; `weighted` with total weight 0 gives NaN."""
    values = [value for value, _ in pairs]
    if reducer == "sum":
        return math.fsum(values)
    if reducer == "mean":
        return math.fsum(values) / len(values)
    if reducer == "max":
        return max(values)
    if reducer == "min":
        return min(values)
    if reducer == "last":
        return values[-1]
    total = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs if weight) / total if total else math.nan
