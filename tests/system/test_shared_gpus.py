"""A run whose engines share the trainer's GPUs is bit for bit the run with GPUs for each side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.tensors import read_hf
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, tiny_config, train
from tests.support.runs.whole_runs import start_run

pytestmark = pytest.mark.engine

STEPS, FIRST = 4, 2
# What depends on the time, on the machine or on the mode.
DIFFERENT = ("time/", "perf/", "memory/", "system/", "sync/", "rollout/", "total/", "step_time", "wall_time")
FAULTY_ENTRY = ("-m", "tests.support.runs.shared_faults")


def config(directory: Path, *, shared: bool, **changes: Any) -> dict[str, Any]:
    """`changes`: sections of the config, and `model` the arguments of the model."""
    made = tiny_config(directory, steps=STEPS, **changes.pop("model", {}))
    made["run"] |= {"deterministic": True, "export": True}
    made["evaluation"]["every"] = 2
    made["algorithm"] = {"kl": {"coef": 0.01}}
    made["rollout"]["share_gpus"] = shared
    made["checkpoint"]["every"] = FIRST
    for section, values in changes.items():
        made[section] = {**made.get(section, {}), **values}
    return made


def numbers(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if not name.startswith(DIFFERENT)} for record in run.metrics]


def assert_equal(run: Run, expected: Run) -> None:
    """Both have exported the same weights, and recorded the same numbers of every step."""
    weights, others = (read_hf(each.directory / "hf") for each in (run, expected))
    assert weights.keys() == others.keys()
    assert [name for name in others if not torch.equal(weights[name], others[name])] == []
    left, right = numbers(run), numbers(expected)
    assert len(left) == len(right) == STEPS and len(left[0]) > 20
    differing = {
        name for a, b in zip(left, right, strict=True) for name in a.keys() | b.keys() if a.get(name) != b.get(name)
    }
    assert differing == set()


def test_shared_gpus_give_the_same_run_in_every_bit(tmp_path: Path) -> None:
    """With partial rollouts, evaluations, a reference policy, and a resume in the middle."""
    disjoint = train(config(tmp_path / "disjoint", shared=False))
    assert disjoint.code == 0, disjoint.output
    settings = config(tmp_path / "shared", shared=True)
    begun = train(settings, f"run.steps={FIRST}")
    assert begun.code == 0, begun.output
    resumed = train(settings)
    assert resumed.code == 0, resumed.output
    assert "resuming from" in resumed.output
    assert_equal(resumed, disjoint)


CASES: dict[str, dict[str, Any]] = {
    "one version per response": {"rollout": {"partial_rollout": False}},
    "mixture of experts": {"model": {"family": "qwen3_moe"}, "trainer": {"parallel": {"expert": 2}}},
    "engine of two workers": {"rollout": {"tensor_parallel": 2}},
    "pipeline": {"trainer": {"parallel": {"pipeline": 2}}},
    "bf16": {"trainer": {"precision": "bf16"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_so_do_other_layouts(tmp_path: Path, case: str) -> None:
    runs = [train(config(tmp_path / str(shared), shared=shared, **CASES[case])) for shared in (False, True)]
    assert [run.code for run in runs] == [0, 0], [run.output[-3000:] for run in runs]
    assert_equal(runs[1], runs[0])


@pytest.mark.slow
def test_a_run_may_change_between_shared_and_separate_gpus(tmp_path: Path) -> None:
    disjoint = train(config(tmp_path / "disjoint", shared=False))
    settings = config(tmp_path / "changing", shared=True)
    for overrides in ((f"run.steps={FIRST}",), ("rollout.share_gpus=false",)):
        changed = train(settings, *overrides)
        assert changed.code == 0, changed.output
    assert_equal(changed, disjoint)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["engine in hand-over", "engine asleep", "engine awake", "rank parked"])
def test_a_run_goes_on_after_a_loss_in_any_turn(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no response was in flight, not a bit changes."""
    monkeypatch.setenv("SHARED_FAULT", fault)
    monkeypatch.setenv("SHARED_FAULT_MARK", str(tmp_path / "mark"))
    settings = config(tmp_path / "faulty", shared=True, checkpoint={"every": 1})
    process = start_run(settings, restarts=1, script=FAULTY_ENTRY)
    output, _ = process.communicate(timeout=900)
    run = Run(process.returncode, output, tmp_path / "faulty" / "run")
    assert run.code == 0, output[-5000:]
    assert (tmp_path / "mark").exists()
    assert len(run.metrics) == STEPS
    if fault != "engine awake":
        assert_equal(run, train(config(tmp_path / "disjoint", shared=False)))
    assert_nothing_left(run.directory)
