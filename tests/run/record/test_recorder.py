"""The files that a run writes about itself, on the rank that writes and on one that does not, and in a checkpoint."""

import asyncio
import gc
import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.process.memory_tuning import begin_start
from megarl.common.rundir.notices import write_notice
from megarl.common.rundir.run_files import ExitRecord
from megarl.config.schema import Config
from megarl.evaluation.accuracy import ScoredResponse
from megarl.evaluation.harness import SetReport, evaluate_set
from megarl.models.hf.read_config import load_info
from megarl.queue.trajectory import Trajectory
from megarl.report.reading.run_events import read_run_events
from megarl.rollout.admission.counters import Counters
from megarl.rollout.agents.trajectory_builder import failed_trajectory
from megarl.run.record import recorder as recorder_module
from megarl.run.record.recorder import LastEvaluation, Recorder, ResultFiles, Totals
from megarl.run.step.plan import CountersDiffer, plan_step
from megarl.telemetry.monitor import RUN, Alarm, AlarmRule
from megarl.telemetry.sinks import sinks
from megarl.telemetry.trace import events
from megarl.weights.plan.settings import SyncReport
from tests.support.measures.growth import growth_per_step, held_bytes
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.recorded_steps import make_batch
from tests.support.trainer.trained_groups import trained_as_planned

PEAK_GIB = 1.5
ROWS = make_batch(0)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    return config_of(model, run__dir=str(tmp_path / "run"), run__steps=4, telemetry__samples_per_step=2)


@pytest.fixture
def open_recorder(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recorder]]:
    """`open_recorder(rank)` is the recorder of a rank whose clock has started; its terminal is `recorder.terminal`."""
    monkeypatch.setattr(recorder_module, "peak_memory_gib", lambda group: PEAK_GIB)
    opened = []

    def get(rank: int = 0) -> Recorder:
        terminal = io.StringIO()
        made = Recorder(config, SimpleNamespace(is_first=rank == 0, group=None), terminal)  # type: ignore[arg-type]
        made.terminal = terminal  # type: ignore[attr-defined]
        made.describe_model(load_info(config.model.path))
        made.load_tokenizer()
        opened.append(made)
        return made

    yield get
    for each in opened:
        each.close()


def report(score: float = 1.0, version: int = 0) -> SetReport:
    """Return the report of a set of two problems, of which the first gets `score` and the second 0."""

    async def respond(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
        return ScoredResponse(score if index == 0 else 0.0, "7", tokens=3)

    return asyncio.run(evaluate_set("held_out", ["a", "b"], respond, samples=2, version=version))


def take_step(
    recorder: Recorder, config: Config, step: int = 0, rows: list[Trajectory] = ROWS, **timings: float
) -> None:
    """Record one step of the recorded trajectories, as the loop does."""
    plan = plan_step([row.tag for row in rows], config, dp_size=1, version=0)
    with recorder.phase("update"):
        recorder.metrics.record("policy/updates", 1)
    of_batch = {"rollout/replicas_alive": 1.0, **timings}
    recorder.step(step, plan, of_batch, trained_as_planned(plan), version=1, counted=None)
    recorder._writer.flush()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_notices_of_the_pool_are_on_the_terminal_of_the_first_rank_alone(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    first, second = open_recorder(0), open_recorder(1)
    (config.run_dir / "logs").mkdir(parents=True)
    write_notice(config.run_dir, "reward function 'judge:f': exception no. 1: LookupError")
    for each in (first, second):
        each.show_notices()
    assert second._notices is None
    assert first.terminal.getvalue().count("exception no. 1: LookupError\n") == 1  # type: ignore[attr-defined]
    assert second.terminal.getvalue() == ""  # type: ignore[attr-defined]


class AtOnce:
    """Writes in the caller's thread; a thread's own objects vary with what it is doing at the moment."""

    def __init__(self, *arguments: object) -> None:
        self.flush = lambda: None
        self.close = lambda last, *bound: [write() for _, write in last]

    def submit(self, what: str, write: Callable[[], object]) -> None:
        write()


def test_nothing_that_it_holds_grows_with_the_steps(
    config: Config, open_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "WriterThread", AtOnce)
    recorder, held = open_recorder(), []
    for step in range(240):
        take_step(recorder, config, step)
        recorder.terminal.truncate(0)  # type: ignore[attr-defined]
        recorder.terminal.seek(0)  # type: ignore[attr-defined]
        if step >= 40 and step % 10 == 9:  # the table's speed is that of 20 steps
            held.append(held_bytes(vars(recorder)))
    # What is made once, at a time that the clock decides, is not growth; one object per step in a list is 32 bytes.
    assert growth_per_step(range(0, 10 * len(held), 10), held) < 8.0, held


COUNTED = {"trained": 3, "filtered": 1, "dropped_stale": 2, "failed": 1, "reused": 4}


@pytest.mark.parametrize("name", ["nothing", *COUNTED])
@pytest.mark.parametrize("side", ["the trainer's", "rollout's"])
def test_a_count_that_only_one_side_has_is_found(name: str, side: str) -> None:
    """Each side is changed in turn: the comparison passes exactly if neither is."""
    totals = Totals()
    values = {f"groups/{each}": float(number) for each, number in COUNTED.items()}
    values |= {f"batch/{each}": 0.0 for each in Totals.BATCH} | {"groups/admitted": 7.0}
    counted = Counters(admitted=9, in_flight=2, **COUNTED)
    if name != "nothing":
        if side == "rollout's":
            counted = replace(counted, **{name: COUNTED[name] + 1})
        else:
            values[f"groups/{name}"] += 1
    totals.add(values)
    with (
        nullcontext() if name == "nothing" else pytest.raises(CountersDiffer, match=r"after 5 steps .* lost or trained")
    ):
        totals.compare(5, counted)


def test_a_step_that_the_rollout_side_has_counted_otherwise_ends_the_run(
    open_recorder: Callable[..., Recorder], config: Config
) -> None:
    recorder = open_recorder()
    plan = plan_step([row.tag for row in ROWS], config, dp_size=1, version=0)
    recorder.metrics.record("policy/updates", 1)
    ended = {name: len(groups) for name, groups in plan.ended.items()}
    with pytest.raises(CountersDiffer):
        counted = Counters(**ended | {"trained": ended["trained"] + 1})
        recorder.step(0, plan, {"rollout/replicas_alive": 1.0}, trained_as_planned(plan), 1, counted)
    assert {name: getattr(plan.outcome, name) for name in ended} == ended


# --- the parts that a checkpoint keeps


STEP_VALUES = st.fixed_dictionaries(
    {f"groups/{name}": st.integers(0, 99) for name in Totals.GROUPS}
    | {f"batch/{name}": st.integers(0, 10**6) for name in Totals.BATCH}
)


@given(st.lists(STEP_VALUES, min_size=1, max_size=6), st.integers(0, 6))
def test_totals_are_sums_over_the_committed_history(steps: list[dict[str, int]], saved_after: int) -> None:
    whole, first, resumed = Totals(), Totals(), Totals()
    for values in steps:
        reported = whole.add({name: float(value) for name, value in values.items()})
    for values in steps[:saved_after]:
        first.add({name: float(value) for name, value in values.items()})
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for values in steps[saved_after:]:
        resumed.add({name: float(value) for name, value in values.items()})
    assert resumed.state_dict() == whole.state_dict()
    sums = {name: sum(values[name] for values in steps) for name in steps[0]}
    for name, value in sums.items():
        kind, _, short = name.partition("/")
        assert reported[f"total/groups_{short}" if kind == "groups" else f"total/{short}"] == value


def test_a_step_that_publishes_nothing_outdates_the_evaluation_too(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    recorder = open_recorder()
    recorder.evaluation(0, 0, "before", [report()])
    [evaluated] = [part for part in recorder.parts if part.key == LastEvaluation.key]
    assert evaluated.state_dict() != {}
    take_step(recorder, config)
    assert evaluated.state_dict() == {}


def test_a_resumed_run_has_no_evaluation_of_its_own_weights() -> None:
    """The metrics in the checkpoint describe weights that the next checkpoint does not hold."""
    last = LastEvaluation()
    last.load_state_dict({"eval/held_out/greedy": 0.5})
    assert last.state_dict() == {}


def test_positions_are_those_of_complete_records(config: Config, open_recorder: Callable[..., Recorder]) -> None:
    recorder, files = open_recorder(), ResultFiles(config.run_dir)
    assert files.state_dict() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    take_step(recorder, config)
    position = files.state_dict()["metrics.jsonl"]
    assert position == (config.run_dir / "metrics.jsonl").stat().st_size > 0
    take_step(recorder, config, step=1)
    recorder.cut_result_files(1, {"metrics.jsonl": position, "samples.jsonl": 0})
    assert [line["step"] for line in lines(config.run_dir / "metrics.jsonl")] == [1]
    assert [line["step"] for line in lines(config.run_dir / "rolled_back.jsonl")] == [2]
    assert "1 records beyond step 1 moved to" in recorder.terminal.getvalue()  # type: ignore[attr-defined]


# --- steps, evaluations, samples, the end


def test_the_first_step_ends_the_start_in_which_garbage_is_collected_rarely(
    open_recorder: Callable[..., Recorder],
) -> None:
    """Tensors in cycles would stay for long, and what is there now would be visited at every later collection."""
    before = gc.get_threshold()
    recorder = open_recorder()
    gc.unfreeze()
    begin_start()
    try:
        recorder.start_clock()
        assert gc.get_threshold()[0] < 10_000 and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_the_time_to_the_end_leaves_out_start_up_and_the_time_of_earlier_starts(
    config: Config, open_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = open_recorder()
    now = recorder_module.time.monotonic()
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now)
    now += 1000.0  # for start-up
    recorder.start_clock()
    for step in range(2):
        now += 10.0
        take_step(recorder, config, step=step)
    now += 500.0
    recorder.start_clock(steps_done=2)  # of a run that is resumed
    now += 4.0
    take_step(recorder, config, step=2)
    found = [line["time/eta"] for line in lines(config.run_dir / "metrics.jsonl")]
    assert found == pytest.approx([30.0, 20.0, 4.0])


def test_a_step_is_written_with_totals_times_and_throughput(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    recorder = open_recorder()
    take_step(recorder, config)
    take_step(recorder, config, step=1)
    first, second = lines(config.run_dir / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    assert (first["groups/trained"], first["groups/filtered"], first["groups/admitted"]) == (3, 1, 4)
    assert (first["total/groups_trained"], second["total/groups_trained"]) == (3, 6)
    assert second["total/groups_admitted"] == 8 and second["batch/failed_samples"] == 1
    assert second["rollout/replicas_alive"] == 1 and second["policy/updates"] == 1
    assert second["perf/trainer_peak_memory_gib"] == PEAK_GIB
    assert 0 < first["time/update"] < first["time/step"]
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["exit"]) == (2, "running")
    assert "2/4" in recorder.terminal.getvalue()  # type: ignore[attr-defined]


def test_the_start_up_belongs_to_no_step(config: Config, open_recorder: Callable[..., Recorder]) -> None:
    recorder = open_recorder()
    recorder.sync(0, SyncReport(version=0, seconds=3.0, bytes=8, buckets=1, digest_seconds=0.5, pause_seconds=1.5))
    with recorder.phase("sync"):
        pass
    try:
        recorder.start_clock()
    finally:
        gc.unfreeze()
    recorder.sync(
        1,
        SyncReport(version=1, seconds=2.0, bytes=8, buckets=1, digest_seconds=0.5, pause_seconds=1.0, restarted=("a",)),
    )
    take_step(recorder, config)
    (line,) = lines(config.run_dir / "metrics.jsonl")
    assert (line["sync/seconds"], line["sync/version"], line["sync/restarted_replicas"]) == (2.0, 1, 1)
    assert line["sync/pause_seconds"] == 1.0
    assert line["time/sync"] == 0.0


def test_an_evaluation_is_written_at_the_steps_done_with_its_version(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    recorder = open_recorder()
    recorder.sync(5, SyncReport(version=5, seconds=1.0, bytes=8, buckets=1, digest_seconds=0.1, pause_seconds=0.5))
    recorder.evaluation(3, 5, "step_3", [report(version=5), replace(report(0.0, 5), name="other")])
    recorder._writer.flush()
    held_out, other = lines(config.run_dir / "metrics.jsonl")
    assert (held_out["step"], held_out["eval/version"], held_out["eval/held_out/greedy"]) == (3, 5, 0.5)
    assert (other["step"], other["eval/version"], other["eval/other/greedy"]) == (3, 5, 0.0)
    shown = recorder.terminal.getvalue()  # type: ignore[attr-defined]
    assert shown.count("(step_3): greedy") == 2 and "3/4" not in shown  # a line per set, none of the step table
    kept = {part.key: part.state_dict() for part in recorder.parts}["metrics"]
    ours = ("eval/held_out/", "eval/other/")
    assert kept == {name: value for name, value in (held_out | other).items() if name.startswith(ours)}
    recorder.sync(6, SyncReport(version=6, seconds=1.0, bytes=8, buckets=1, digest_seconds=0.1, pause_seconds=0.5))
    assert {part.key: part.state_dict() for part in recorder.parts}["metrics"] == {}


def test_an_evaluation_alongside_training_is_written_when_it_has_ended(
    open_recorder: Callable[..., Recorder], config: Config
) -> None:
    """It says when it began and what it saw; the metrics of a mixture belong to no checkpoint."""
    recorder = open_recorder()
    mixed = replace(report(version=5), oldest=4, newest=7)
    recorder.evaluation(3, 5, "step_3", [mixed], written_at=6)
    recorder._writer.flush()
    [line] = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "eval/step", "eval/version", "eval/oldest_version", "eval/newest_version")
    assert [line[name] for name in names] == [6, 3, 5, 4, 7]
    assert "versions 4 to 7" in recorder.terminal.getvalue()  # type: ignore[attr-defined]
    [evaluated] = [part for part in recorder.parts if part.key == LastEvaluation.key]
    recorder.sync(5, SyncReport(5, 1.0, 1, 1, 0.0, 0.0))
    assert evaluated.state_dict() == {}


def test_the_summary_has_the_evaluations_before_between_and_after(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    recorder = open_recorder()
    for steps, label, score in ((0, "before", 0.0), (2, "step_2", 0.5), (4, "after", 1.0)):
        recorder.evaluation(steps, steps, label, [report(score)])
    recorder.finish(ExitRecord("finished", 4, ""))
    summary = json.loads((config.run_dir / "summary.json").read_text())
    found = [summary[name] and summary[name]["greedy"] for name in ("eval_before", "eval_latest", "eval_after")]
    assert found == [0.0, 0.25, 0.5] and summary["exit"] == "finished"
    assert json.loads((config.run_dir / "exit.json").read_text()) == {
        "status": "finished",
        "step": 4,
        "reason": "",
        "unsaved_steps": 0,
    }


def test_samples_that_an_earlier_step_had_are_not_shown_again(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    plan = plan_step([row.tag for row in ROWS], config, dp_size=1, version=0)
    shown = {key for step in range(50) for key in open_recorder().sample_keys(step, plan)}
    assert shown == {row.key for row in ROWS}
    again = replace(plan, reused=frozenset([0, 3]))
    reused = {key for step in range(50) for key in open_recorder().sample_keys(step, again)}
    assert {key.split(":")[0] for key in shown - reused} == {"0", "3"} and reused


def test_samples_are_text_and_a_failed_one_is_empty(config: Config, open_recorder: Callable[..., Recorder]) -> None:
    recorder = open_recorder()
    plan = plan_step([row.tag for row in ROWS], config, dp_size=1, version=0)
    chosen = recorder.sample_keys(6, plan)
    assert len(chosen) == 2 and set(chosen) <= set(plan.tags)
    failed = failed_trajectory(9, 0, "the tool is gone")
    recorder.samples(6, [(ROWS[0], "42"), (failed, None)])
    recorder._writer.flush()
    first, second = lines(config.run_dir / "samples.jsonl")
    assert (first["step"], first["reference"], first["response_tokens"]) == (7, "42", len(ROWS[0].response_ids))
    assert first["response"] and first["prompt"]
    assert (second["prompt"], second["response"], second["status"]) == ("", "", "failed")
    assert second["failure"] == "the tool is gone" and second["versions"] == []


def test_another_rank_writes_nothing_and_measures_all_the_same(
    config: Config, open_recorder: Callable[..., Recorder]
) -> None:
    recorder = open_recorder(rank=1)
    recorder.say("waiting")
    recorder.status("training")
    recorder.sync(1, SyncReport(version=1, seconds=1.0, bytes=8, buckets=1, digest_seconds=0.1, pause_seconds=0.5))
    take_step(recorder, config)
    recorder.evaluation(1, 1, "step_1", [report()])
    recorder.roll_back(0)
    recorder.finish(ExitRecord("finished", 1, ""))
    assert not config.run_dir.exists() and recorder.terminal.getvalue() == ""  # type: ignore[attr-defined]
    states = {part.key: part.state_dict() for part in recorder.parts}
    assert states["totals"]["groups_admitted"] == 4 and states["summary"]["steps"] == 1
    assert states["metrics"]["eval/held_out/greedy"] == 0.5


@pytest.mark.parametrize("rank", [0, 1])
def test_alarms_are_events_of_the_first_rank(config: Config, open_recorder: Callable[..., Recorder], rank: int) -> None:
    events.open_events(config.telemetry.events_mib, config.run_dir, "trainer-0")
    try:
        config.run_dir.mkdir(exist_ok=True)
        recorder = open_recorder(rank)
        recorder.start_clock()
        rule = AlarmRule("replica_gap", "above", 4.0, 1, "warn")
        recorder.alarm(Alarm(rule, 5.0, 1, 1, begins=True))
        recorder.alarm_ended("replica_gap", 1, "its value recovered")
        recorder.alarm(Alarm(replace(rule, name="ess"), 5.0, RUN, 1, begins=True))
    finally:
        events.close_events()
    found = read_run_events(config.run_dir).faults
    assert [(fault.kind, fault.step, fault.outcome) for fault in found] == (
        [] if rank else [("alarm", 1, "its value recovered"), ("alarm", 1, "")]
    )
    assert all(fault.text.startswith("alarm ") for fault in found)
