"""The benchmark of asynchronous training, without its runs: calibration, configs and results."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_vs_sync
from benchmarks.async_vs_sync import (
    CLASSES,
    MODES,
    balanced_groups,
    imbalance,
    possible_speed_up,
    rows_of,
    run_config,
    tail_row,
)
from benchmarks.whole_run import Window
from megarl.config.pace import pace_of, pace_problems
from megarl.config.schema import Config


def window(tokens_per_s: float, wait_s: float, train_s: float) -> Window:
    step = wait_s + train_s
    return Window(8, 1.0, tokens_per_s, step_s=step, wait_s=wait_s, train_s=train_s, sync_s=0.0)


def lengths(cut: int = 512) -> list[int]:
    """Lengths as the model draws them: geometric, by class."""
    rng = random.Random(0)
    means = rng.choices([each.mean for each in CLASSES], [each.share for each in CLASSES], k=4000)
    return [min(cut, 1 + int(rng.expovariate(1 / mean))) for mean in means]


def test_a_number_of_steps_that_cannot_be_measured_is_refused_before_any_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["async_vs_sync.py", "--quick", "--keep", str(tmp_path)])
    monkeypatch.setattr(async_vs_sync, "write_model", lambda *given, **named: 1)
    monkeypatch.setattr(async_vs_sync, "write_prompts", lambda *given: None)
    monkeypatch.setattr(async_vs_sync, "steps_after", refuse)
    monkeypatch.setattr(async_vs_sync, "run_mode", lambda *given: pytest.fail("a run was made"))
    with pytest.raises(ValueError, match="4 steps of async"):
        async_vs_sync.main()


def refuse(config: dict[str, Any], steps: int) -> int:
    raise ValueError(f"{steps} steps of {config['admission']['mode']}")


def test_the_classes_have_a_long_tail() -> None:
    row = tail_row(lengths())
    assert row.ok and row.details["median"] < 20
    assert not tail_row(lengths(cut=100)).ok


@pytest.mark.parametrize(
    ("wait_s", "train_s", "groups"),
    [(2.0, 2.0, 16), (3.0, 2.0, 48), (1.0, 2.0, 5), (9.0, 1.0, 64), (0.0, 2.0, 4), (2.0, 1.0, 64)],
)
def test_groups_are_changed_towards_balance(wait_s: float, train_s: float, groups: int) -> None:
    assert balanced_groups(16, wait_s, train_s) == groups


def test_possible_speed_up() -> None:
    assert possible_speed_up(2.0, 2.0) == 2.0 and possible_speed_up(1.0, 3.0) == pytest.approx(4 / 3)


def test_rows() -> None:
    sync, ahead = window(100.0, 1.0, 1.2), window(180.0, 0.1, 1.2)
    rows = {row.name.split(":")[0]: row for row in rows_of({"sync": [sync], "async": [ahead]}, lengths(), 16)}
    assert list(rows) == ["async / sync", "async / possible", "balance", "tail"]
    assert rows["async / sync"].ratio == 1.8 and rows["async / possible"].ratio == pytest.approx(1.8 / (2.2 / 1.2))
    assert rows["balance"].ratio == pytest.approx(1.2) and all(row.ok for row in rows.values())


def test_each_bound_can_be_missed() -> None:
    fair = window(100.0, 1.0, 1.0)

    def missed(sync: Window, tokens_per_s: float, cut: int = 512) -> set[str]:
        rows = rows_of({"sync": [sync], "async": [window(tokens_per_s, 0.0, 1.0)]}, lengths(cut), 16)
        return {row.name.split(":")[0] for row in rows if not row.ok}

    assert missed(fair, 190.0) == set()
    assert missed(fair, 170.0) == {"async / possible"}
    assert missed(fair, 150.0) == {"async / sync", "async / possible"}
    assert missed(window(100.0, 1.0, 1.5), 190.0) == {"balance"} and imbalance(window(1.0, 1.0, 1.5)) == 1.5
    assert missed(fair, 190.0, cut=100) == {"tail"}


def test_a_mode_without_a_bound_is_only_shown() -> None:
    windows = {name: [window(100.0, 1.0, 1.0)] for name in ("sync", "async", "other")}
    windows["other"] = [window(80.0, 1.0, 1.0)]
    rows = {row.name: row for row in rows_of(windows, lengths(), 16)}
    assert rows["other / sync"].bound is None and rows["other / sync"].ok and not rows["async / sync"].ok
    assert rows["other / async"].ratio == 0.8 and rows["other / async"].bound is None


@pytest.mark.parametrize("mode", MODES)
def test_configs(mode: str) -> None:
    options = argparse.Namespace(max_tokens=512, max_num_seqs=256)
    config = Config.model_validate(run_config(options, Path("/nowhere"), mode, groups=16, steps=4))
    assert list(pace_problems(config)) == [] and pace_of(config).runs_ahead is (mode != "sync")
    assert config.rollout.partial_rollout is (mode != "async, whole responses") and config.rollout.max_num_seqs == 256
