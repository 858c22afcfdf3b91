"""`make vision`, and its control: the model learns to read a picture, and only if it is the prompt's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.models.assets import Assets, make_assets
from tests.support.runs.run import start

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("vision") / "assets", "--task", "bars")


def trained(assets: Assets, data: str, run_dir: Path) -> dict[str, Any]:
    """The summary of a run of vision_cpu.yaml on a file of the assets."""
    made = assets.directory
    heldout = f'[{{"name": "bars", "path": "{made / "heldout.jsonl"}"}}]'
    process = start(
        ROOT / "examples/rl/configs/vision_cpu.yaml",
        f"run.dir={run_dir}",
        f"model.path={made / 'model'}",
        f"data.path={made / data}",
        f"evaluation.sets={heldout}",
    )
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output[-4000:]
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval_before"]["n"] == summary["eval_after"]["n"] >= 500
    return summary


def test_it_learns_to_read_the_picture(assets: Assets, tmp_path: Path) -> None:
    summary = trained(assets, "train.jsonl", tmp_path / "run")
    for mode in ("greedy", "sampled"):
        assert summary["eval_before"][mode] < 0.40 and summary["eval_after"][mode] > 0.80, (mode, summary)


def test_pictures_of_other_prompts_teach_nothing(assets: Assets, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (assets.directory / "train.jsonl").read_text().splitlines()]
    shuffled = [row | {"images": other["images"]} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
    path = assets.directory / "shuffled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in shuffled))
    summary = trained(assets, path.name, tmp_path / "run")
    for mode in ("greedy", "sampled"):
        assert summary["eval_after"][mode] < 0.40, (mode, summary)
