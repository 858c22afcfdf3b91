"""The README's first command, and its control: what it learns, it learns from the rewards."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.models.assets import Assets
from tests.support.runs.run import start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONGEST_S = 360.0  # the README says 2 to 6 minutes, for the assets and the run


def quickstart(assets: Assets, run_dir: Path, *overrides: str) -> dict[str, Any]:
    made = assets.directory
    heldout = f'[{{"name": "additions", "path": "{made / "heldout.jsonl"}"}}]'
    begun = time.monotonic()
    process = start(
        ROOT / "examples/rl/configs/quickstart_cpu.yaml",
        f"run.dir={run_dir}",
        f"model.path={made / 'model'}",
        f"data.path={made / 'train.jsonl'}",
        f"evaluation.sets={heldout}",
        *overrides,
    )
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-4000:]
    assert assets.seconds + time.monotonic() - begun <= LONGEST_S
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns(assets: Assets, tmp_path: Path, seed: int) -> None:
    summary = quickstart(assets, tmp_path / "run", f"run.seed={seed}")
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["n"] >= 500 and after["n"] == before["n"]
    for mode in ("greedy", "sampled"):
        assert after[mode] - before[mode] >= 0.30, (mode, before, after)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("monitor/alarms", 0) for line in lines) == 0, "false alarms"
    parsed = [line["eval/additions/parsed"] for line in lines if "eval/additions/parsed" in line]
    assert len(parsed) >= 2 and min(parsed) >= 0.9, "the answers that the reward function finds, before and after"


def test_permuted_rewards_teach_nothing(assets: Assets, tmp_path: Path) -> None:
    summary = quickstart(assets, tmp_path / "run", "algorithm.permute_rewards=true")
    for mode in ("greedy", "sampled"):
        assert summary["eval_after"][mode] - summary["eval_before"][mode] <= 0.05, (mode, summary)
