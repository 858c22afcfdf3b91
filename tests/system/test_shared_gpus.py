"""A run whose engines share the trainer's GPUs is bit for bit the run with GPUs for each side."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.run.loop.gpu_turns import Turn
from tests.support.models.tensors import read_hf
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, tiny_config, train
from tests.support.runs.whole_runs import killed_after, start_run
from tests.support.shared_gpus.shared_faults import TURNS, VICTIMS

pytestmark = pytest.mark.engine

STEPS, FIRST = 4, 2
# What depends on the time, on the machine or on the mode.
DIFFERENT = ("time/", "perf/", "memory/", "system/", "sync/", "rollout/", "total/", "step_time", "wall_time")
FAULTY_ENTRY, FAULTY_STEPS = ("-m", "tests.support.shared_gpus.shared_faults"), 8
FAULTY: dict[str, Any] = {
    "run": {"steps": FAULTY_STEPS},
    "sampling": {"max_tokens": 48},
    "checkpoint": {"every": 1},
}


def config(directory: Path, *, shared: bool, **changes: Any) -> dict[str, Any]:
    """`changes`: sections of the config, and `model` the arguments of the model."""
    made = tiny_config(directory, steps=STEPS, **changes.pop("model", {}))
    made["run"] |= {"deterministic": True, "export": True}
    made["evaluation"]["every"] = 2
    made["algorithm"] = {"kl": {"coef": 0.01}}
    made["rollout"]["share_gpus"] = shared
    made["weight_sync"] = {"bucket_mb": 0.05}  # so that a publication has several
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


def train_faulty(settings: dict[str, Any], victim: str, turns: Sequence[Turn], *, restarts: int = 0) -> Run:
    """A run whose `victim` is killed once in each of `turns`, with as many `restarts` of the ranks."""
    directory = Path(settings["run"]["dir"])
    marks = marks_of(directory)
    marks.mkdir()
    for turn in set(TURNS) - set(turns):
        (marks / turn).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARED_FAULT", victim)
        patch.setenv("SHARED_FAULT_MARKS", str(marks))
        process = start_run(settings, restarts=restarts, script=FAULTY_ENTRY)
    with killed_after(process, directory):
        output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output[-5000:]
    assert {turn for turn in TURNS if not (marks / turn).exists()} == set(), output[-5000:]
    return Run(process.returncode, output, directory)


def marks_of(run_dir: Path) -> Path:
    return run_dir.parent / "marks"


def test_shared_gpus_give_the_same_run_in_every_bit(tmp_path: Path) -> None:
    """With partial rollouts, evaluations, a reference policy, a resume in the middle, and an engine lost after it."""
    disjoint = train(config(tmp_path / "disjoint", shared=False))
    assert disjoint.code == 0, disjoint.output
    settings = config(tmp_path / "shared", shared=True)
    begun = train(settings, f"run.steps={FIRST}")
    assert begun.code == 0, begun.output
    resumed = train_faulty(settings, "engine", [Turn.PUBLISH])
    assert "resuming from" in resumed.output
    assert_equal(resumed, disjoint)


CASES: dict[str, dict[str, Any]] = {
    "one version per response": {"rollout": {"partial_rollout": False}},
    "mixture of experts": {"model": {"family": "qwen3_moe"}, "trainer": {"parallel": {"expert": 2}}},
    "replayed experts": {"model": {"family": "qwen3_moe"}, "trainer": {"router_replay": "r3"}},
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


# What shows that a run has made the mistake. None: its weights, and nothing else.
SHOWN: dict[str, str | None] = {
    "wake_before_compare": "has had no weights since it slept",
    "moments_not_restored": None,
    "one_left_awake": "was not put to sleep before a publication",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", SHOWN)
def test_a_mistake_in_a_hand_over_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Run, mutation: str
) -> None:
    monkeypatch.setenv("SHARED_MUTATION", mutation)
    settings = config(tmp_path, shared=True, **FAULTY)
    if SHOWN[mutation] is not None:
        settings["run"]["steps"] = FIRST  # each publication may replace an engine
    process = start_run(settings, script=("-m", "tests.support.shared_gpus.shared_mutations"))
    with killed_after(process, tmp_path / "run"):
        output, _ = process.communicate(timeout=900)
    logs = output + "".join(path.read_text(errors="replace") for path in (tmp_path / "run/logs").rglob("*.log"))
    if (shown := SHOWN[mutation]) is not None:
        assert shown in logs
        return
    assert process.returncode == 0, output[-3000:]
    weights, others = (read_hf(directory / "hf") for directory in (tmp_path / "run", undisturbed.directory))
    assert any(not torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.slow
def test_a_run_may_change_between_shared_and_separate_gpus(tmp_path: Path) -> None:
    disjoint = train(config(tmp_path / "disjoint", shared=False))
    settings = config(tmp_path / "changing", shared=True)
    for overrides in ((f"run.steps={FIRST}",), ("rollout.share_gpus=false",)):
        changed = train(settings, *overrides)
        assert changed.code == 0, changed.output
    assert_equal(changed, disjoint)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(config(tmp_path_factory.mktemp("undisturbed"), shared=False, **FAULTY))
    assert run.code == 0, run.output
    return run


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_goes_on_after_a_loss_in_each_turn(tmp_path: Path, undisturbed: Run, victim: str) -> None:
    """Not a bit changes before the last fault, at which responses are in flight.

    No engine starts while a rank holds memory.
    """
    run = train_faulty(config(tmp_path, shared=True, **FAULTY), victim, TURNS, restarts=len(TURNS))
    assert len(run.metrics) == FAULTY_STEPS
    steps = int((marks_of(run.directory) / TURNS[-1]).read_text())
    assert steps >= 2
    assert numbers(run)[:steps] == numbers(undisturbed)[:steps]
    assert_engines_started_alone(run.directory)
    assert_nothing_left(run.directory)


def assert_engines_started_alone(run_dir: Path) -> None:
    """No trainer rank held memory at any time from the creation of an engine's actor until its engine slept."""
    held = [span for file in marks_of(run_dir).glob("holds-*.jsonl") for span in spans_of_memory(file)]
    starts = list(spans_of_starts(run_dir))
    assert held and starts
    assert [(start, span) for start in starts for span in held if start[0] < span[1] and span[0] < start[1]] == []


def spans_of_memory(file: Path) -> Iterator[tuple[float, float]]:
    """The times in which a rank held a part of its state, in seconds since the epoch."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue={"at": math.inf}):
        if line["holds"]:
            yield line["at"], following["at"]


def spans_of_starts(run_dir: Path) -> Iterator[tuple[float, float]]:
    """The times in which engines started, in seconds since the epoch, of those that have generated after it."""
    for file in (run_dir / "events").glob("replica-*.steps.*.jsonl"):
        header, *events = map(json.loads, file.read_text().splitlines())
        paused = [event["t"] for event in events if event["n"] == "paused"]
        if paused:
            began_ms = int(file.name.split(".")[1])
            yield began_ms / 1e3, (header["wall_ns"] - header["monotonic_ns"]) / 1e9 + min(paused) / 1e6
