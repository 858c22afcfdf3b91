"""Another layout after the resume: it replays the steps that the unbroken run recorded, and ends where that did."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models.tensors import Tensors, read_hf
from tests.support.runs.run import Run, train
from tests.support.runs.whole_runs import config_of, replay

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DEVIATION = 1e-4  # ||difference|| / ||what the replayed steps have changed||, per tensor
STEPS = 4


def run_of(directory: Path, parallel: dict[str, Any], family: str) -> Run:
    config = config_of(directory, steps=STEPS, family=family, evaluation={"every": 0, "sets": []})
    config["trainer"]["parallel"] = parallel
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    return run


@pytest.mark.parametrize(
    ("family", "saved", "layouts"),
    [
        ("qwen3", {"tensor": 2}, [(2, {"tensor": 1, "pipeline": 2}), (1, {"tensor": 1})]),
        ("qwen3_moe", {"expert": 2}, [(1, {"expert": 1})]),
    ],
)
def test_the_steps_after_the_resume_replay_the_unbroken_run(
    tmp_path: Path, family: str, saved: dict[str, Any], layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    run = run_of(tmp_path, saved, family)
    end = read_hf(run.directory / "hf")
    # What the two steps after the checkpoint change: its own weights are those of the first replayed step's start.
    same = [f"trainer.parallel.{key}={value}" for key, value in saved.items()]
    assert_equal(replay(run, tmp_path / "same", 2, *same, checkpoint=2), end)
    middle = replay(run, tmp_path / "one", 2, *same, checkpoint=2, steps=1)
    for number, (ranks, layout) in enumerate(layouts):
        overrides = [f"trainer.parallel.{key}={value}" for key, value in layout.items()]
        got = replay(run, tmp_path / f"other{number}", ranks, *overrides, checkpoint=2)
        for name, value in end.items():
            moved = float((value - middle[name]).norm())  # by the last step alone: less than the two have
            assert moved > 0 and float((got[name] - value).norm()) <= DEVIATION * moved, name


def assert_equal(first: Tensors, second: Tensors) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert bool((value == second[name]).all()), name
