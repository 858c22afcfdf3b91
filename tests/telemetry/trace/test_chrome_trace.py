"""A run's events as a trace: nested spans, windows of steps, and Perfetto's own reading."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli.main import main
from megarl.telemetry.trace import writer as event_writer_module
from megarl.telemetry.trace.chrome_trace import ROUNDING_US, Placed, TraceWindow, share_lines, trace_events
from megarl.telemetry.trace.lines import CONTROLLER, rank_process, replica_process
from tests.support.telemetry.event_runs import SimulatedClock, event_writer
from tests.support.telemetry.perfetto import ask_perfetto

SPANS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 120)), max_size=60)


def properly_nested(placed: list[Placed[Any]]) -> bool:
    """On each line, any two spans are one in the other or apart."""
    for first, second in itertools.combinations(placed, 2):
        if first.line == second.line:
            early, late = sorted([first, second], key=lambda each: (each.begin, -each.end))
            if late.begin < early.end < late.end:
                return False
    return True


@given(SPANS, st.integers(1, 8))
def test_units_share_lines_without_overlap(spans: list[tuple[int, int]], units: int) -> None:
    given_ = [(begin, begin + length, number % units, number) for number, (begin, length) in enumerate(spans)]
    placed = share_lines(given_)
    assert properly_nested(placed) and sorted(each.item for each in placed) == list(range(len(spans)))
    for each in placed:
        begin, end, *_ = given_[each.item]
        assert each.begin == begin and end - ROUNDING_US <= each.end <= end and each.end >= each.begin


def test_nested_spans_stay_on_one_line_and_units_that_follow_each_other_use_it_again() -> None:
    step = [(0, 100, "s", "step"), (0, 40, "s", "generate"), (40, 103, "s", "update"), (45, 60, "s", "mini_batch")]
    placed = share_lines([*step, (150, 160, "t", "next"), (155, 170, "u", "alongside")])
    assert {each.item: (each.line, each.end) for each in placed} == {
        "step": (0, 100), "generate": (0, 40), "update": (0, 100), "mini_batch": (0, 60), "next": (0, 160),
        "alongside": (1, 170),
    }  # fmt: skip


def write_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two ranks, a replica and the controller, each on a host of its own."""

    def of(process: str) -> Any:
        return event_writer(run_dir, process, SimulatedClock())

    first, second = of(rank_process(0)), of(rank_process(1))
    replica, controller = of(replica_process(0)), of(CONTROLLER)
    hosts = {first: rank_process(0), second: rank_process(1), replica: replica_process(0), controller: CONTROLLER}
    for step in range(1, 4):
        at = 1000.0 + 10 * step
        for writer in (first, second):
            writer.record("generate", at, at + 4, step=step)
            writer.record("update", at + 4, at + 8, step=step)
            writer.record("mini_batch", at + 4.5, at + 7, step=step)
            writer.record("sync", at + 8, at + 9.5, step=step)
            writer.record("step", at, at + 10, step=step)
        first.record("sync_pause", at + 8.1, at + 8.2, version=step)
        first.record("sync_resume", at + 9.0, at + 9.1, version=step)
        first.record("publication", at + 8.0, at + 9.4, version=step, args={"bytes": 5})
        replica.record("paused", at + 8.15, at + 9.05, version=step, replica=0)
        replica.record("load_weights", at + 8.3, at + 8.9, version=step, replica=0)
        replica.record("load", at + 1, replica=0, args={"running": step, "waiting": 0, "kv_usage": 0.5})
        for sample in range(3):
            begin = at + sample * 0.5
            name: dict[str, Any] = {"group": step, "sample": sample, "replica": 0}
            controller.record("turn", begin, begin + 2, **name, args={"turn": 0, "tokens": 9})
            controller.record("reward", begin + 2, begin + 2.5, **name, args={"error": 0})
            controller.record("trajectory", begin, begin + 2.6, **name, args={"turns": 1, "tokens": 9})
    controller.record("slow_trajectory", 1011.0, 1013.6, step=2, group=2, sample=2, args={"cause": "queue"})
    controller.record("fault", 1021.0, replica=0, args={"kind": "engine", "text": "gone"})
    for writer, process in hosts.items():
        monkeypatch.setattr(event_writer_module.platform, "node", lambda process=process: f"host-of-{process}")
        writer.flush()


def test_a_trace_names_processes_and_threads_and_nests_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, monkeypatch)
    events = list(trace_events(tmp_path))
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert sorted(names.values()) == ["controller", "replica 0", "trainer rank 0", "trainer rank 1"]
    spans = [each for each in events if each["ph"] == "X"]
    assert len({each["ts"] for each in spans}) > 10 and min(each["ts"] for each in spans) == 0
    where = {(each["name"], names[each["pid"]], threads[each["pid"], each["tid"]]) for each in spans}
    assert {("mini_batch", "trainer rank 1", "train"), ("publication", "trainer rank 0", "weight sync calls")} <= where
    assert {thread for name, _, thread in where if name.startswith("trajectory")} == {
        "samples", "samples (2)", "samples (3)", "slowest samples",
    }  # fmt: skip
    for line in {(each["pid"], each["tid"]) for each in spans}:
        mine = [each for each in spans if (each["pid"], each["tid"]) == line]
        assert properly_nested([Placed(0, each["ts"], each["ts"] + each["dur"], each) for each in mine])
    arrows = [(each["ph"], each["id"]) for each in events if each["ph"] in "sf"]
    assert sorted(arrows) == [("f", 1), ("f", 2), ("f", 3), ("s", 1), ("s", 2), ("s", 3)]
    assert [each["args"]["text"] for each in events if each["name"] == "fault: engine"] == ["gone"]


def test_a_window_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, monkeypatch)
    shown = list(trace_events(tmp_path, TraceWindow.of_steps(tmp_path, 2, 2)))
    assert {each["args"]["step"] for each in shown if "step" in each.get("args", {})} == {2}
    assert {each["args"]["group"] for each in shown if each["name"].startswith("trajectory")} == {2}
    assert "fault: engine" in {each["name"] for each in shown}
    with pytest.raises(ValueError, match="no events of the steps 9 to inf"):
        TraceWindow.of_steps(tmp_path, 9, None)


def test_perfetto_reads_the_trace_as_it_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace processor finds no error, the tree of spans, the names, the arguments, the counter and the arrows."""
    write_run(tmp_path, monkeypatch)
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "trace.json")]) == 0
    slices, parents, processes, arguments, counters, flows, marks = ask_perfetto(
        tmp_path / "trace.json",
        "select count(*) as count from slice where dur >= 0 and category != 'flow'",
        "select distinct child.name as name, parent.name as parent from slice child "
        "left join slice parent on child.parent_id = parent.id",
        "select process.name as process, thread.name as thread, count(*) as count from thread_track "
        "join thread using (utid) join process using (upid) join slice on slice.track_id = thread_track.id "
        "group by process, thread order by process, thread",
        "select extract_arg(arg_set_id, 'args.step') as step, dur from slice where name = 'update' order by ts",
        "select counter_track.name as name, value from counter join counter_track on counter.track_id = "
        "counter_track.id order by counter.ts, name",
        "select a.name as begin, b.name as end from flow join slice a on a.id = slice_out "
        "join slice b on b.id = slice_in",
        "select name, extract_arg(arg_set_id, 'args.text') as text from slice where name like 'fault%'",
    )
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = sum(each["ph"] in "Xi" for each in written)
    assert slices[0]["count"] == spans > 50
    tree = {(each["name"], each["parent"]) for each in parents}
    assert {
        ("step", None), ("update", "step"), ("mini_batch", "update"), ("generate", "step"), ("sync", "step"),
        ("sync_pause", "publication"), ("load_weights", "paused"), ("turn", "trajectory 2:1"),
        ("reward", "trajectory 3:0"), ("trajectory 1:2", None),
    } <= tree  # fmt: skip
    threads = {(each["process"], each["thread"]) for each in processes}
    assert {("trainer rank 0", "train"), ("trainer rank 1", "train"), ("controller", "samples (3)")} <= threads
    assert [(each["step"], each["dur"]) for each in arguments] == [
        (step, 4_000_000_000) for step in (1, 2, 3) for _ in range(2)
    ]  # fmt: skip
    assert {each["value"] for each in counters} == {0.0, 0.5, 1.0, 2.0, 3.0}
    assert [(each["begin"], each["end"]) for each in flows] == [("publication", "load_weights")] * 3
    assert marks == [{"name": "fault: engine", "text": "gone"}]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, monkeypatch)
    assert main(["trace", str(tmp_path), "--from", "2"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'trace.json.gz'}: " in out and "https://ui.perfetto.dev" in out
    with gzip.open(tmp_path / "trace.json.gz") as file:
        steps = {each["args"].get("step") for each in json.load(file)["traceEvents"] if each["name"] == "update"}
    assert steps == {2, 3}
    for arguments, message in [
        ([str(tmp_path / "nowhere")], f"there is no run directory {tmp_path / 'nowhere'}"),
        ([str(tmp_path), "--from", "77"], "no events of the steps 77 to inf; --from and --to are steps"),
        ([str(tmp_path), "--out", str(tmp_path / "a" / "b")], "cannot be written: No such file or directory; give"),
    ]:
        assert main(["trace", *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert "has no events: the run has telemetry.events_mib=0" in capsys.readouterr().err
