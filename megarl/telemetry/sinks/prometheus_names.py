"""The names of the metrics in Prometheus, derived from their declarations.

`eval/{set}/greedy` in `share` is `megarl_eval_greedy_ratio{set="..."}`: the prefix, the words of the name, and the unit
as Prometheus writes it, if the name does not contain it. A placeholder of the declaration is a label.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.metrics.registry import Metric

PREFIX = "megarl_"
RUN_LABEL = "run"
# A unit's words: the first is the suffix, unless the name has one of them (https://prometheus.io/docs/practices/naming).
# Other units are their own word.
_UNIT_WORDS: dict[str, tuple[str, ...]] = {
    "1": (),
    "B": ("bytes",),
    "GiB": ("gib",),
    "TFLOP/s": ("tflops",),
    "s": ("seconds",),
    "share": ("ratio", "share", "fraction"),
    "steps": ("steps", "step"),
    "times": (),
    "tokens/s": ("tokens_per_second",),
}
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PrometheusName:
    """The name of one declared metric in Prometheus, its labels alongside `run`, and its help text."""

    name: str
    labels: tuple[str, ...]
    text: str


# Further metrics of a scrape.
INFO = PrometheusName(f"{PREFIX}run_info", ("run_dir", "version"), "Always 1; the labels describe the run.")
STEPS_DONE = PrometheusName(f"{PREFIX}steps_done", (), "Training steps that the run has finished and written.")
STEPS_PLANNED = PrometheusName(f"{PREFIX}steps_planned", (), "Training steps of the whole run (`run.steps`).")
LAST_STEP = PrometheusName(
    f"{PREFIX}last_step_timestamp_seconds",
    (),
    "Time at which the newest step was written, in seconds since 1970; 0 before the first.",
)
FIXED = (INFO, STEPS_DONE, STEPS_PLANNED, LAST_STEP)


def name_of(metric: Metric) -> PrometheusName:
    """Return the name of a declared metric."""
    path = _PLACEHOLDER.sub("", metric.name).replace("@", "_at_")
    words = re.sub(r"[^A-Za-z0-9]+", "_", path).strip("_").lower()
    unit = _UNIT_WORDS.get(metric.unit, (metric.unit,))
    if unit and not any(f"_{word}_" in f"_{words}_" for word in unit):
        words = f"{words}_{unit[0]}"
    text = f"{metric.meaning} {metric.name} in docs/reference/metrics.md; unit: {metric.unit}."
    return PrometheusName(PREFIX + words, tuple(_PLACEHOLDER.findall(metric.name)), text)


@cache
def all_names() -> Mapping[str, PrometheusName]:
    """Return every name that a scrape may have."""
    return {each.name: each for each in (*FIXED, *map(name_of, REGISTRY))}


@cache
def place_of(name: str) -> tuple[PrometheusName, tuple[str, ...]]:
    """Return the Prometheus name and label values of a metric recorded as `name`. Raises UndeclaredMetricError."""
    metric = REGISTRY.lookup(name)
    pieces = _PLACEHOLDER.split(metric.name)  # text, placeholder, text, ...
    pattern = "".join(re.escape(piece) if not index % 2 else "([^/]+)" for index, piece in enumerate(pieces))
    match = re.fullmatch(pattern, name)
    assert match is not None  # `lookup` has matched the same pattern
    return name_of(metric), match.groups()


def samples(values: Mapping[str, float]) -> Iterator[tuple[PrometheusName, list[tuple[tuple[str, ...], float]]]]:
    """Yield each Prometheus name once, with the (label values, value) pairs of the recorded metrics `values`."""
    found: dict[str, tuple[PrometheusName, list[tuple[tuple[str, ...], float]]]] = {}
    for name, value in values.items():
        place, labels = place_of(name)
        found.setdefault(place.name, (place, []))[1].append((labels, value))
    yield from found.values()
