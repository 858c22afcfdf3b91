"""TRL's GRPOTrainer against megarl, `sync` and `async`, on the same two cores. At most 12 minutes on an idle machine.

    python -m benchmarks.trl_race [--json FILE] [--quick] [--task NAME ...]

Same model, data, batch, reward, optimizer and loss on all sides, everything in fp32. TRL generates by transformers and
computes with two threads, in one process. It runs with three micro-batches, and the best counts; between its runs those
of megarl take their turn. The first steps of each run, `skip`, are not measured, nor are the last ones of `async`, for
which rollout is ahead: as many samples are generated in what is measured as are trained. Tasks:

- additions: the quickstart's task, 0.4 M parameters, about 20 tokens;
- long: 27 M parameters, groups of 8, up to 256 tokens, about 100 on average, so that computing dominates. The answers'
  lengths come from lib/length_model.py, and the reward is the share of one letter. The learning rate is so low that
  the lengths stay what they are: at 1e-4 the policy wrote 256 tokens each time after twelve steps.

TRL 1.16 comes with the packages of tests (`make setup-test`).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.lib.length_model import LengthClass, write_model, write_prompts
from benchmarks.lib.report import ROOT, Ratio, finish, new_parser
from benchmarks.lib.whole_run import environment, fresh, measure, run_command

MINUTES = 12.0
TRL_VERSION = "1.16"
TRL_ENVIRONMENT = {"OMP_NUM_THREADS": "2", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
RUN_LIMIT_S = 900.0


@dataclass(frozen=True)
class Task:
    """A task of the race.

    `trl_steps`: of a run of TRL, of which the first `trl_skip` are not measured. Of megarl `steps` are measured, after
    `skip` others; as many follow as rollout may be ahead (`steps_after`). `ranks`: of the trainer.
    No process is pinned: trainer and engines use both cores, in turn or as the operating system divides them.
    """

    name: str
    groups: int
    samples_per_group: int
    max_tokens: int
    reward: str
    lr: float
    eps: float
    micro_batches: tuple[int, ...]
    micro_batch_tokens: int
    trl_steps: int
    trl_skip: int
    steps: int
    skip: int
    replicas: int
    ranks: int
    trl_threads: int = 2

    @property
    def samples(self) -> int:
        return self.groups * self.samples_per_group


TASKS = {
    "additions": Task(
        "additions", groups=48, samples_per_group=8, max_tokens=24, reward="math", lr=7e-4, eps=3e-3,
        micro_batches=(384, 128, 64), micro_batch_tokens=8192, trl_steps=24, trl_skip=2, steps=16, skip=8,
        replicas=1,
        ranks=1,  # the passes are so short that a second rank costs more processor time than it saves
    ),
    "long": Task(
        "long", groups=4, samples_per_group=8, max_tokens=256, reward="benchmarks.lib.length_model:letter_share",
        lr=1e-6, eps=1e-8, micro_batches=(32, 8, 4), micro_batch_tokens=4096, trl_steps=3, trl_skip=1, steps=4, skip=4,
        replicas=2, ranks=2,
    ),
}  # fmt: skip
SAME_LENGTH = 1.25  # two runs differ by chance too: 64 samples of TRL are measured
LONG_CLASSES = (LengthClass(1.0, 110),)  # 99 tokens on average, because the longest are cut
LONG_SIZE = {"hidden": 448, "layers": 11}


@dataclass(frozen=True)
class RaceResult:
    """A run: samples trained per second, seconds per step, the mean reward of every step, and what a response has.

    `length`: response tokens per sample, of the steps that are measured.
    """

    samples_per_s: float
    step_s: float
    rewards: list[float]
    length: float

    def curve(self) -> str:
        """Return the rewards as text, at most 9 of them."""
        every = -(-len(self.rewards) // 9)
        return " ".join(f"{reward:.2f}" for reward in self.rewards[::every])


class Race:
    """One task: its files, and the runs on them."""

    def __init__(self, task: Task, directory: Path, assets: Path, options: argparse.Namespace) -> None:
        self.task, self.directory, self.options = task, directory, options
        directory.mkdir(parents=True)
        if task.name == "long":
            size = {"hidden": 128, "layers": 2} if options.quick else LONG_SIZE
            parameters = write_model(directory / "model", LONG_CLASSES, **size)
            write_prompts(directory / "prompts.jsonl", LONG_CLASSES, 1000)
            self.model, self.data = directory / "model", directory / "prompts.jsonl"
            print(f"long: {parameters} parameters")
        else:
            self.model, self.data = assets / "model", assets / "train.jsonl"

    def trl(self, micro_batch: int) -> RaceResult:
        """Run TRL with this micro-batch."""
        task = self.task
        spec = {
            "model": str(self.model), "data": str(self.data), "groups": task.groups, "seed": 0,
            "threads": task.trl_threads,
            "samples_per_group": task.samples_per_group, "max_tokens": task.max_tokens, "reward": task.reward,
            "lr": task.lr, "eps": task.eps, "steps": task.trl_steps, "micro_batch": micro_batch,
        }  # fmt: skip
        place = fresh(self.directory, f"trl-{micro_batch}")
        place.with_suffix(".json").write_text(json.dumps(spec))
        found = run_trl(place.with_suffix(".json"), place)
        ends = found["ends"][task.trl_skip :]
        seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        length = statistics.fmean(found["lengths"][task.trl_skip :])
        return self._said(
            f"TRL, micro-batch {micro_batch}", RaceResult(task.samples / seconds, seconds, found["rewards"], length)
        )

    def config(self, mode: str) -> dict[str, Any]:
        """Return the config of a run of megarl."""
        task = self.task
        optimizer = {"lr": task.lr, "eps": task.eps, "weight_decay": 0.0}
        return {
            "run": {"name": f"{task.name}_{mode}", "steps": task.skip + task.steps, "export": False},
            "model": {"path": str(self.model)},
            "trainer": {
                "gpus": task.ranks,
                "precision": "fp32",
                "micro_batch_tokens": task.micro_batch_tokens,
                "optimizer": optimizer,
            },
            # TRL trains every group.
            "algorithm": {"filter_zero_variance": False},
            "batch": {"groups": task.groups, "samples_per_group": task.samples_per_group},
            "sampling": {"max_tokens": task.max_tokens},
            "data": {"path": str(self.data)},
            "reward": {"function": task.reward},
            "rollout": {"replicas": task.replicas},
            "admission": {"mode": mode},
            "telemetry": {"tensorboard": False},
        }

    def megarl(self, mode: str) -> RaceResult:
        """Run megarl in `mode`."""
        config = self.config(mode)
        config["run"]["dir"] = str(fresh(self.directory, mode))
        window, records = measure(config, self.task.skip, self.task.steps, ranks=self.task.ranks, timeout_s=RUN_LIMIT_S)
        print(f"{self.task.name}: {mode}: {window.details()['seconds per step']}")
        rewards = [record["reward/mean"] for record in records]
        length = window.tokens_per_s / window.samples_per_s
        return self._said(f"megarl {mode}", RaceResult(window.samples_per_s, window.step_s, rewards, length))

    def rows(self) -> list[Ratio]:
        """Run everything, in turn, and return the rows."""
        small, middle, large = sorted(self.task.micro_batches)
        trl = {middle: self.trl(middle)}
        sync = self.megarl("sync")
        trl[large] = self.trl(large)
        ahead = self.megarl("async")
        trl[small] = self.trl(small)
        return rows_of(self.task.name, trl, sync, ahead)

    def _said(self, name: str, result: RaceResult) -> RaceResult:
        print(
            f"{self.task.name}: {name}: {result.samples_per_s:.1f} samples/s; {result.length:.0f} tokens each; "
            f"rewards {result.curve()}"
        )
        return result


def rows_of(task: str, trl: dict[int, RaceResult], sync: RaceResult, ahead: RaceResult) -> list[Ratio]:
    """Return the rows of a task. `trl`: TRL's runs by micro-batch."""
    best = max(trl.values(), key=lambda run: run.samples_per_s)
    curves = {f"reward of {name}": run.curve() for name, run in (("TRL", best), ("sync", sync), ("async", ahead))}
    tried = ", ".join(f"{number}: {run.samples_per_s:.1f}" for number, run in sorted(trl.items()))
    rates = {
        "samples/s": f"TRL {best.samples_per_s:.1f}, sync {sync.samples_per_s:.1f}, async {ahead.samples_per_s:.1f}"
    }
    lengths = {"TRL": best.length, "sync": sync.length, "async": ahead.length}
    tokens = {"tokens per response": ", ".join(f"{name} {length:.0f}" for name, length in lengths.items())}
    details = rates | {"TRL by micro-batch": tried, "TRL's step": f"{best.step_s:.1f} s"} | tokens | curves
    per_trl = ahead.samples_per_s / best.samples_per_s
    if task == "additions":
        return [
            Ratio(f"{task}: async / TRL", per_trl, 0.8, True, details),
            Ratio(f"{task}: sync / TRL", sync.samples_per_s / best.samples_per_s),
        ]
    return [
        Ratio(f"{task}: sync / TRL", sync.samples_per_s / best.samples_per_s, 2.0, True, details),
        Ratio(f"{task}: async / sync", ahead.samples_per_s / sync.samples_per_s, 1.15, True),
        Ratio(f"{task}: async / TRL", per_trl),
        Ratio(f"{task}: TRL's step / 60 s", best.step_s / 60.0, 1.0),
        # A policy that learns longer answers has more to do for a sample.
        Ratio(f"{task}: longest / shortest responses", max(lengths.values()) / min(lengths.values()), SAME_LENGTH),
    ]


def run_trl(spec: Path, place: Path) -> dict[str, Any]:
    """Run TRL in a process of its own; return what it has measured.

    Raises SystemExit with the end of its output if it fails.
    """
    result, log = place.with_suffix(".result.json"), place.with_suffix(".log")
    command = [sys.executable, "-m", "benchmarks.trl_race.grpo", str(spec), str(result)]
    if run_command(command, log, RUN_LIMIT_S, environment() | TRL_ENVIRONMENT):
        raise SystemExit(f"TRL failed:\n{log.read_text(errors='replace')[-3000:]}")
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def require_trl() -> None:
    """Raise SystemExit with the way to install it if TRL is not here, or is another version."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = ""
    if not found.startswith(TRL_VERSION):
        raise SystemExit(
            f"trl_race needs TRL {TRL_VERSION}, and {found or 'none'} is here: make setup-test installs it"
        )


def quick(task: Task) -> Task:
    """Return the task at a size that only shows that it runs, also where other load makes two threads wait a lot."""
    return replace(task, groups=2, micro_batches=(16, 8, 4), trl_steps=2, trl_skip=1, steps=4, skip=1, trl_threads=1)


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--assets", type=Path, default=ROOT / "runs/quickstart/assets", help="the quickstart's; made if not there"
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    require_trl()
    from examples.quickstart.build import build_assets
    from examples.quickstart.warm_start import WarmStart

    rows: list[Ratio] = []
    with tempfile.TemporaryDirectory(prefix="trl-race-") as name:
        directory = (options.keep or Path(name)).resolve()
        if options.quick:
            options.assets = directory / "assets"
        if "additions" in options.task:
            build_assets(options.assets, size=WarmStart(steps=5) if options.quick else None)
        started = time.monotonic()
        for chosen in options.task:
            task = quick(TASKS[chosen]) if options.quick else TASKS[chosen]
            rows += Race(task, fresh(directory, chosen), options.assets, options).rows()
        minutes = (time.monotonic() - started) / 60
    rows.append(
        Ratio(f"duration / {MINUTES:.0f} minutes", minutes / MINUTES, 1.0, details={"minutes": round(minutes, 1)})
    )
    return finish(rows, options)


if __name__ == "__main__":
    sys.exit(main())
