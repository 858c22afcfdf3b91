"""The race against TRL, without running: the best micro-batch, the results, the same setting on both sides."""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import pytest

import benchmarks.trl_race as script
from benchmarks.trl_race import TASKS, Race, RaceResult, best_micro_batch, quick, require_trl, rows_of
from megarl.algorithms.losses.ppo import PPOOptions
from megarl.config.algorithm import filters_equal_rewards, loss_of
from megarl.config.pace import pace_problems
from megarl.config.schema import Config
from tests.support.checkout import ROOT


def result(samples_per_s: float, length: float = 100.0) -> RaceResult:
    return RaceResult(samples_per_s, 30.0, [0.1, 0.2], length)


TRL = {4: result(5.0), 8: result(10.0), 32: result(7.0)}


def test_the_best_micro_batch_counts() -> None:
    assert best_micro_batch(TRL) == 8


def missed(task: str, sync: float, ahead: float, bare: float | None = None) -> list[str]:
    return [row.name for row in rows_of(task, TRL, result(sync), result(ahead), bare) if not row.ok]


def test_bounds_of_the_additions() -> None:
    assert missed("additions", 4.0, 8.0, 8.8) == []
    assert missed("additions", 99.0, 7.9, 8.0) == ["additions: async / TRL"]
    assert missed("additions", 4.0, 8.0, 9.0) == ["additions: async / bare engine"]


def test_bounds_of_the_long_task() -> None:
    assert missed("long", 20.0, 23.0) == []
    assert missed("long", 19.9, 23.0) == ["long: sync / TRL"]
    assert missed("long", 20.0, 22.9) == ["long: async / sync"]
    slow = {8: RaceResult(10.0, 61.0, [0.0], 100.0)}
    assert [row.name for row in rows_of("long", slow, result(20.0), result(23.0), None) if not row.ok] == [
        "long: TRL's step / 60 s"
    ]
    rows = rows_of("long", TRL, result(20.0), result(23.0, 126.0), None)
    assert [row.name for row in rows if not row.ok] == ["long: longest / shortest responses"]


@pytest.mark.parametrize(
    "task", [each for full in TASKS.values() for each in (full, quick(full))], ids=lambda t: t.name
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_configs(task: script.Task, mode: str, tmp_path: Path) -> None:
    race = Race.__new__(Race)
    race.task, race.model, race.data = task, tmp_path / "model", tmp_path / "data.jsonl"
    config = Config.model_validate(race.config(mode))
    assert list(pace_problems(config)) == []
    # What TRL's side is given by its own names (trl_race_grpo.py).
    assert config.trainer.optimizer.betas == (0.9, 0.95) and config.trainer.optimizer.clip_grad == 1.0
    assert (config.algorithm.advantage, config.algorithm.loss, config.algorithm.aggregation) == (
        "grpo",
        "ppo",
        "token_mean",
    )
    assert loss_of(config).options == PPOOptions(clip_low=0.2, clip_high=0.2) and config.algorithm.kl.coef == 0.0
    assert not filters_equal_rewards(config) and config.trainer.mini_batches == 1
    assert config.sampling.temperature == 1.0 and config.trainer.optimizer.schedule == "constant"


@pytest.mark.parametrize(
    "task", [each for full in TASKS.values() for each in (full, quick(full))], ids=lambda t: t.name
)
def test_three_micro_batches_divide_the_batch(task: script.Task) -> None:
    assert len(set(task.micro_batches)) == 3 and all(task.samples % size == 0 for size in task.micro_batches)
    assert task.trl_skip < task.trl_steps


def answers(monkeypatch: pytest.MonkeyPatch, code: int, out: str, err: str = "") -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: argparse.Namespace(returncode=code, stdout=out, stderr=err))


def test_trl_is_required_in_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers(monkeypatch, 0, "1.16.0\n")
    require_trl(tmp_path)
    answers(monkeypatch, 0, "1.17.1\n")
    with pytest.raises(SystemExit, match=r"needs TRL 1\.16 in .*TRL 1\.17\.1 was found.*--help.*--trl DIR"):
        require_trl(tmp_path)
    answers(monkeypatch, 1, "", "Traceback\nModuleNotFoundError: No module named 'trl'\n")
    with pytest.raises(SystemExit, match="in this environment: ModuleNotFoundError: No module named 'trl'"):
        require_trl(None)


def test_the_help_installs_what_the_tests_lock() -> None:
    shown = set(re.findall(r"[a-z-]+==[0-9.]+", script.__doc__ or ""))
    assert len(shown) == 8
    assert shown <= set((ROOT / "requirements" / "test.lock").read_text().split())


def test_a_curve_is_short() -> None:
    assert RaceResult(1.0, 1.0, [0.1] * 24, 20.0).curve().split() == ["0.10"] * 8
