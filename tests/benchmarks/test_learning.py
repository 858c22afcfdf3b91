"""The benchmark of learning, without its runs: configs and results."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.learning import MODES, STALENESS, LearningResult, rows_of, run_config
from megarl.algorithms.correction import CorrectionSpec
from megarl.config.load import load_config
from megarl.config.old_logprobs import correction_of
from megarl.config.pace import pace_of
from megarl.config.schema import Config


def outcome(sampled: float, staleness: float = STALENESS) -> LearningResult:
    return LearningResult({"greedy": 0.2, "sampled": 0.4}, {"greedy": 1.0, "sampled": sampled}, staleness, 40.0)


def config(tmp_path: Path, mode: str) -> Config:
    path = tmp_path / f"{mode}.yaml"
    path.write_text(yaml.safe_dump(run_config(tmp_path, tmp_path / "run", mode, seed=2, steps=None)))
    return load_config(path)


def test_configs(tmp_path: Path) -> None:
    sync, ahead = config(tmp_path, "sync"), config(tmp_path, "async")
    assert correction_of(sync) is None and not pace_of(sync).runs_ahead
    assert correction_of(ahead) == CorrectionSpec("token_tis", 2.0) and pace_of(ahead).max_staleness == STALENESS
    assert sync.run.steps == ahead.run.steps == 20 and sync.run.seed == ahead.run.seed == 2
    assert sync.evaluation.sampling.samples == 8


@pytest.mark.parametrize(("after", "ok"), [(0.90, True), (0.86, True), (0.84, False)])
def test_each_seed_is_compared(after: float, ok: bool) -> None:
    outcomes = {"sync": [outcome(0.88)] * 2, "async": [outcome(0.88), outcome(after)]}
    rows = {row.name: row for row in rows_of(outcomes, [0, 1])}
    assert rows["seed 0, sampled: sync - async, points"].ratio == 0
    assert rows["seed 1, sampled: sync - async, points"].ok is ok
    assert all(row.ok for name, row in rows.items() if not name.startswith("seed 1, sampled"))


@pytest.mark.parametrize("staleness", [STALENESS - 1, STALENESS + 1])
def test_a_run_that_was_not_as_stale_as_it_should_be_is_found(staleness: float) -> None:
    outcomes = {"sync": [outcome(0.88, 0.0)], "async": [outcome(0.88, staleness)]}
    assert list(MODES) == list(outcomes)
    assert [row.ok for row in rows_of(outcomes, [0])].count(False) == 1
