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

Real runs on two CPU cores: Megatron-Core trains a Qwen3 of 0.43 M parameters, one vLLM engine samples. They show what
a run learns and what a fault costs; [benchmarks](benchmarks.md) measure speed. One command makes all numbers of this
page, and another draws it:

```
. .venv/bin/activate
python -m benchmarks.learning
make docs
```

The first adds each run to `benchmarks/results/learning.json` and skips those already there. Each run has {STEPS} steps
of {GROUPS} groups of 8 samples, and answers {HELD_OUT} held-out problems before and after, greedily and sampled at
temperature 1. All runs of a task have the same held-out problems, and runs of one seed the same random numbers for
sampling. The warm start has one seed too, but the runs were made on different CPUs, which round differently.

## Modes, staleness and correction

The task of the [quickstart](quickstart.md). Only `admission` and `algorithm.correction` differ. "async 4" is
`admission.mode: async` with `sync_interval: 1` and `max_staleness: 4`, and the default correction, truncated importance
sampling of tokens. "uncorrected" has `algorithm.correction: {{kind: none}}`: PPO's ratio is relative to the engine's
log-probs.

![Mean reward of each step by mode, and by bound of staleness](images/results_modes.svg)

"""
_MODES = f"""
Reward at the end: mean of the last {LAST} steps. Staleness: updates between the weights of a sample's oldest token and
the update that trains it. ESS and KL compare the trained policy with the sampling policy, at their worst step. Columns
are means over the seeds, with the least and the largest in brackets. Triangles in the pictures mark values beyond the
axis.

The first steps of an asynchronous run train only on samples of the first weights, so a run with a larger bound learns
later. With the correction, the final sampled accuracy does not depend on the bound, and the reward hardly does.
Without it both fall as the bound grows. [Benchmarks](benchmarks.md#asynchronous-training) show what each mode gains in
time.

![Effective sample size and KL by bound of staleness](images/results_mismatch.svg)

## An agent with and without its tool

The task of `make agents`: multiplication with a calculator as a tool. At first the model guesses, and calls the tool
in one of five samples. Without the tool it has one turn and can only guess. The answer must be in a box
(`require_box`), because `math` would also accept the expression of a call, such as 733*78.

"""
# Of two runs that are not in the file; tests/system/test_bars.py makes both again.
_SIGHT = """
## A model that sees

`make vision`: a Qwen2.5-VL that has learned only which of three bars is the shortest has to name the longest
([models that see](training/vision.md)). 150 steps of 48 groups of 8 samples, one seed, 600 held-out pictures. Guessing
among the three bars gives 33%. In the second run, the control, each prompt has the picture of another one.

| trained on | greedy, before | greedy, after | sampled, before | sampled, after |
|---|---|---|---|---|
| its own pictures | 0.0% | 95.8% | 22.0% | 95.8% |
| pictures of other prompts | as above | 20.0% | as above | 24.6% |
"""
_RECOVERY = """
## Recovery after faults

The soak's run (asynchronous, two engines, a checkpoint every five steps; [benchmarks](benchmarks.md#the-soak))
under one fault after another. A fault is over when the run has made two more steps, or all engines serve again.
[Faults](reference/faults.md) lists what each fault costs in general.

"""


def results_page() -> str:
    """Return the whole page in Markdown."""
    results = Results.read(RESULTS)
    parts = [_HEAD, *_table(results, "additions", list(MODES)), _MODES]
    if any(run.task == "calculator" for run in results.runs):
        parts.append("![Mean reward and calls of the tool](images/results_agents.svg)\n\n")
    parts += [*_table(results, "calculator", list(AGENTS)), _SIGHT, _RECOVERY, *_recovery(results)]
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
    yield "| fault | at | over after | steps repeated |\n|---|---|---|---|\n"
    for fault in results.recovery.faults:
        yield f"| `{fault.name}` | {fault.at_s:.0f} s | {fault.recovered_s:.0f} s | {fault.redone_steps} |\n"
    silent = f"{results.recovery.rpc_s:g}"
    yield f"\nMade by `python -m benchmarks.learning --only recovery --rpc-s {silent}`, alongside other work on two\n"
    yield f"cores. A hanging part is lost after `timeouts.rpc_s`, {silent} s here; a killed one at once.\n"
