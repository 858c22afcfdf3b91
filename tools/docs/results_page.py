"""Generates docs/results.md from the kept numbers of benchmarks/learning.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from benchmarks.learning import AGENTS, FAULTS, GROUPS, HELD_OUT, MODES, STEPS
from benchmarks.lib.learning_results import RESULTS, LearningRun, Results

LAST = 5  # steps, whose mean reward is that of the end
SEEDS = 3

_HEAD = f"""# What can be shown without a GPU

<!-- Generated from benchmarks/results/learning.json by `make docs`; do not edit. -->

Real runs on two CPU cores: Megatron-Core trains a Qwen3 of 0.43 M parameters, one vLLM engine samples. They show
what is learned and what a fault costs; [benchmarks](benchmarks.md) measure speed. One command makes all numbers of
this page, and one draws it:

```
. .venv/bin/activate
python -m benchmarks.learning
make docs
```

It adds each run to `benchmarks/results/learning.json` and makes only those that are not there yet. Each run has
{STEPS} steps of {GROUPS} groups of 8 samples, and answers {HELD_OUT} held-out problems before and after, greedily and
sampled at temperature 1. The warm-started model and the held-out problems are the same in all runs, and so are the
random numbers of the samples for one seed. They were made on two kinds of CPU, which round differently.

## Modes, staleness and correction

The task of the [quickstart](quickstart.md). All settings but `admission` and `algorithm.correction` are equal.
"async 4" is `admission.mode: async` with `sync_interval: 1` and `max_staleness: 4`; it corrects by the default,
truncated importance sampling of tokens. "uncorrected" has `algorithm.correction: {{kind: none}}`: PPO's ratio is
that to the engine's log-probs.

![Mean reward of each step by mode, and by bound of staleness](images/results_modes.svg)

"""
_MODES = f"""
Reward at the end: mean of the last {LAST} steps. Staleness: updates between the weights of a sample's oldest token
and the update that trains it. ESS and KL compare the trained policy with the one that has sampled, at their worst
step. The columns are means over the seeds; with several, brackets have the least and the largest. In the pictures a
triangle marks a step with a value beyond the axis.

What an asynchronous run trains in its first steps was all sampled by the first weights, so a larger bound learns later
in the same number of steps. With the correction the sampled accuracy at the end does not depend on the bound, and the
reward hardly; without it both are lower the larger the bound is. What a mode gains in time is in
[benchmarks](benchmarks.md#asynchronous-training).

![Effective sample size and KL by bound of staleness](images/results_mismatch.svg)

## An agent with and without its tool

The task of `make agents`: products for which the model can call a calculator. At first it guesses, and calls it in one
of five samples. Without the tool the same model has one turn, and only guesses are left. The answer has to be in a box
(`require_box`), because `math` also takes the expression of a call, such as 733*78, for its value.

"""
_RECOVERY = """
## Recovery after faults

The soak's run (asynchronous, two engines, a checkpoint every five steps; [benchmarks](benchmarks.md#the-soak))
under one fault after another. A fault is over when the run has gone on for two steps, or all engines serve again.
What each fault costs in general is in [faults](reference/faults.md).

"""


def results_page() -> str:
    """Return the whole page in Markdown."""
    results = Results.read(RESULTS)
    parts = [_HEAD, *_table(results, "additions", list(MODES)), _MODES]
    if any(run.task == "calculator" for run in results.runs):
        parts.append("![Mean reward and calls of the tool](images/results_agents.svg)\n\n")
    parts += [*_table(results, "calculator", list(AGENTS)), _RECOVERY, *_recovery(results)]
    return "".join(parts)


# (heading, value of a run, format). The last three say how far generation was ahead, which it is not for agents.
_COLUMNS: list[tuple[str, Callable[[LearningRun], float], str]] = [
    ("greedy, before", lambda run: run.before.greedy, "{:.1%}"),
    ("greedy, after", lambda run: run.after.greedy, "{:.1%}"),
    ("sampled, before", lambda run: run.before.sampled, "{:.1%}"),
    ("sampled, after", lambda run: run.after.sampled, "{:.1%}"),
    ("reward at the end", lambda run: mean(run.rewards[-LAST:]), "{:.3f}"),
    ("staleness", lambda run: mean(run.staleness), "{:.1f}"),
    ("least ESS", lambda run: min(run.ess), "{:.3f}"),
    ("largest k3 KL", lambda run: max(run.k3_kl), "{:.1g}"),
]


def _table(results: Results, task: str, names: Sequence[str]) -> Iterator[str]:
    columns = _COLUMNS if task == "additions" else _COLUMNS[:-3]
    yield '<div class="matrix" markdown>\n\n'
    yield f"| | seeds | {' | '.join(heading for heading, _, _ in columns)} |\n{'|---' * (len(columns) + 2)}|\n"
    missing = []
    for name in names:
        runs = [run for run in results.runs if (run.task, run.name) == (task, name)]
        missing += [name] * (not runs)
        if runs:
            cells = [_cell(runs, of, form) for _, of, form in columns]
            yield f"| {name} | {len(runs)} | {' | '.join(cells)} |\n"
    yield "\n</div>\n"
    if missing:
        yield f"\nNot made yet: {', '.join(missing)}.\n"
    if short := sorted({run.name for run in results.runs if run.task == task and _seeds(results, run) < SEEDS}):
        yield f"\nWith fewer than {SEEDS} seeds so far: {', '.join(short)}.\n"


def _seeds(results: Results, like: LearningRun) -> int:
    return sum((run.task, run.name) == (like.task, like.name) for run in results.runs)


def _cell(runs: Sequence[LearningRun], of: Callable[[LearningRun], float], form: str) -> str:
    values = [of(run) for run in runs]
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(mean(values)) + (f" [{low}, {high}]" if low != high else "")


def _recovery(results: Results) -> Iterator[str]:
    if results.recovery is None:
        yield f"Not made yet: `python -m benchmarks.learning --only recovery` ({FAULTS.replace(',', ', ')}).\n"
        return
    yield "![Steps and faults on one time line](images/results_recovery.svg)\n\n"
    yield "| fault | at | over after | steps made again |\n|---|---|---|---|\n"
    for fault in results.recovery.faults:
        yield f"| `{fault.name}` | {fault.at_s:.0f} s | {fault.recovered_s:.0f} s | {fault.redone_steps} |\n"
    silent = f"{results.recovery.rpc_s:g}"
    yield f"\nMade by `python -m benchmarks.learning --only recovery --rpc-s {silent}`, alongside other work on two\n"
    yield f"cores. What hangs is lost after `timeouts.rpc_s`, {silent} s here; what is killed, at once.\n"
