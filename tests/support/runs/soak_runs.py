"""The files of a run without processes: real admission, plan, dumps and metrics; random responses and ends."""

import json
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from megarl.config.derived.staleness import pace_of, refill_groups
from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from megarl.data.mixture import Cursor
from megarl.queue.dump import write_batch
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import ScheduleFile
from megarl.rollout.orchestrator.prompt_groups import usable_samples
from megarl.run.record.batch_metrics import record_batch
from megarl.run.record.recorder import Totals
from megarl.run.step.plan import plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.trainer.configs import tree, write_problems
from tests.support.trainer.trained_groups import trained_as_planned

PROMPTS = 10


def write_run(directory: Path, seed: int = 0, *, skipped: Collection[int] = (), **changes: Any) -> Path:
    """Make a run of some steps, with several epochs, and return its directory.

    `skipped`: steps whose gradient is not finite. `changes`: of the config, as keys with `__` for the dots.
    """
    run_dir = directory / "run"
    (run_dir / "logs").mkdir(parents=True)
    data = write_problems(directory / "train.jsonl", PROMPTS)
    plan: dict[str, Any] = {"run__steps": 7, "run__dir": str(run_dir), "rollout__replicas": 2} | changes
    admission = {"mode": "async", "sync_interval": 2, "max_staleness": 4, **plan.pop("admission", {})}
    config = config_from_tree(tree("model", data, admission=admission, **plan))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    for index in range(2):
        (run_dir / "logs" / f"replica-{index}.log").write_text(f"(EngineCore pid={7 + index}) WARNING a line\n" * 2)
    _Run(config, run_dir, random.Random(seed), skipped).write()
    return run_dir


class _Run:
    """A run whose groups finish in a random order, some of them without signal, some failed."""

    def __init__(self, config: Config, run_dir: Path, rng: random.Random, skipped: Collection[int]) -> None:
        self._config, self._run_dir, self._rng, self._skipped = config, run_dir, rng, skipped
        self._pace = pace_of(config)
        self._file = ScheduleFile(run_dir / "schedule.jsonl")
        self._admission = Admission(
            config.batch.groups,
            self._pace,
            refill=refill_groups(config),
            steps=config.run.steps,
            record=self._file.write,
        )
        self._cursor = Cursor(PROMPTS, config.run.seed, True)
        self._rows: dict[int, list[Trajectory]] = {}
        self._started: dict[int, int] = {}
        self._totals, self._version = Totals(), 0

    def write(self) -> None:
        admission, updates = self._admission, self._pace.updates_per_step
        admission.load_state_dict(admission.state_dict())
        lines = [{"step": 0, "eval/version": 0}]
        self._publish()
        for step in range(self._config.run.steps):
            lines.append(self._step(step))
            self._version += updates
            if self._pace.publishes_after(step + 1):
                self._publish()
        self._file.close()
        (self._run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _publish(self) -> None:
        self._admission.announce(self._version)
        self._admission.set_version(self._version)
        self._start()

    def _start(self) -> None:
        self._started |= dict.fromkeys(self._admission.admit(), self._admission.version)

    def _step(self, step: int) -> dict[str, float]:
        while self._admission.batch(step) is None:
            self._finish(self._rng.choice(sorted(self._admission.in_flight)))
        batch = self._admission.batch(step)
        assert batch is not None
        replaced = self._admission.taken(step).replaced
        rows = [row for group in sorted(batch[0] + batch[1]) for row in self._rows[group]]
        write_batch(self._run_dir / "batches", step, self._version, rows[::2], part=0, parts=2)
        write_batch(self._run_dir / "batches", step, self._version, rows[1::2], part=1, parts=2)
        plan = plan_step([row.tag for row in rows], self._config, dp_size=2, version=self._version, replaced=replaced)
        if step in self._skipped:
            write_batch(self._run_dir / "failed_batch", step, self._version, rows, part=0, parts=1)
            lost = plan.skipped()
            assert lost is not None
            plan = lost
        metrics = step_metrics()
        record_batch(metrics, plan, trained_as_planned(plan))
        values = metrics.reduce() | {"total/groups_rolled_back": self._admission.counters.rolled_back}
        self._admission.commit(step, **vars(plan.outcome))
        return {"step": step + 1, "time/step": 1.0, **values, **self._totals.add(values)}

    def _finish(self, group: int) -> None:
        rows = self._rows[group] = self._generate(group)
        versions = {span.counts_as for row in rows for span in row.versions}
        alive = [row.reward for row in rows if row.status == "ok"]
        equal = len(alive) >= 2 and min(alive) == max(alive)
        if equal and self._config.admission.refill and self._admission.replace(group, versions):
            self._start()
        else:
            self._admission.finish(group, usable_samples(row.status for row in rows), versions)

    def _generate(self, group: int) -> list[Trajectory]:
        kind = self._rng.choice(("mixed", "mixed", "mixed", "equal", "broken"))
        prompt = [100 + self._cursor.at(group)[1], 5]
        return [self._sample(group, index, kind, prompt) for index in range(self._config.batch.samples_per_group)]

    def _sample(self, group: int, index: int, kind: str, prompt: list[int]) -> Trajectory:
        tokens, rng = self._rng.randint(2, 9), self._rng
        old, new = self._started[group], self._admission.version
        cut = rng.randint(1, tokens - 1)
        spans = [VersionSpan(old, 0, tokens)]
        if new > old:
            spans = [VersionSpan(old, 0, cut), VersionSpan(new, cut, tokens)]
        failed = kind == "broken" and index > 0
        reward = float(index % 2) if kind == "mixed" else 1.0
        return Trajectory(
            group, index, prompt, [7 + int(reward)] * tokens, [-1.0] * tokens, tuple(spans),
            finish_reason="length" if rng.random() < 0.2 else "stop",
            reward=reward,
            status="failed" if failed else "ok", failure="aborted" if failed else "",
        )  # fmt: skip


def edit_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change every object of a file of JSON lines; one for which `change` returns None is removed."""
    changed = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each) + "\n" for each in changed if each is not None))


def edit_rows(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change every row of one part of a recorded batch; one for which `change` returns None is removed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    changed = [change(row) for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist([row for row in changed if row is not None], schema=table.schema), path)
