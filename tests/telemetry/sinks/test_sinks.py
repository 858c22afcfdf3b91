import errno
import io
import json
import math
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event, SessionLog

from megarl.checkpoint.save.history import positions
from megarl.common.rundir.rotating_lines import older_parts, read_lines
from megarl.common.rundir.run_files import ExitRecord
from megarl.config.schema.job import TimeoutsConfig
from megarl.run.ranks.failure import set_aside
from megarl.telemetry.metrics.progress import COLUMNS, Progress, compact, duration
from megarl.telemetry.metrics.registry import UndeclaredMetricError
from megarl.telemetry.metrics.summary import RunSummary
from megarl.telemetry.sinks import sinks
from megarl.telemetry.sinks.sinks import JsonlSink, MetricsWriter, Sink, WandbSink
from megarl.telemetry.sinks.tensorboard import TensorBoardSink
from megarl.telemetry.sinks.writer_thread import WriterHungError
from tests.support.telemetry import tensorboard_package
from tests.support.trainer.configs import config
from tests.support.waiting import wait_until

VALUES = {"reward/mean": 0.5, "reward/accuracy": 0.25, "policy/loss": -0.01, "time/step": 2.5, "time/eta": 130.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_a_run_writes(tmp_path: Path) -> None:
    chosen = config("model", run__dir=str(tmp_path), telemetry={"samples_per_step": 1})
    terminal = io.StringIO()
    with MetricsWriter.open(chosen, terminal) as writer:
        writer.write(1, VALUES)
        writer.write(2, VALUES | {"policy/grad_norm": math.nan})
        writer.sample(2, lambda: {"prompt": "1+1=", "response": "zwei ü", "reward": 1.0})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["step"] == 1 and first["reward/mean"] == 0.5 and first["wall_time"] > 1e9
    assert second["policy/grad_norm"] is None
    assert lines(tmp_path / "samples.jsonl") == [{"step": 2, "prompt": "1+1=", "response": "zwei ü", "reward": 1.0}]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert len(terminal.getvalue().splitlines()) == 3


def test_an_undeclared_metric_is_written_nowhere(tmp_path: Path) -> None:
    chosen = config("model", run__dir=str(tmp_path))
    with MetricsWriter.open(chosen, io.StringIO()) as writer, pytest.raises(UndeclaredMetricError):
        writer.write(1, {"reward/mean": 1.0, "reward/meen": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_second_run_in_the_directory_appends(tmp_path: Path) -> None:
    chosen = config("model", run__dir=str(tmp_path), telemetry={"tensorboard": False, "samples_per_step": 0})
    for step in (1, 2):
        with MetricsWriter.open(chosen, io.StringIO()) as writer:
            writer.write(step, VALUES)
            writer.sample(step, lambda: {"never": "written"})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "tensorboard").exists() and not (tmp_path / "samples.jsonl").exists()


def test_wandb_missing_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricsWriter.open(config("model", run__dir=str(tmp_path), telemetry={"wandb_project": "p"}), io.StringIO())


def test_wandb_goes_on_in_the_same_run_after_a_resume_and_not_in_that_of_an_earlier_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    begun: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    fake = SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append)
    monkeypatch.setattr(wandb, "init", lambda **arguments: begun.append(arguments) or fake)
    chosen = config("model", run__dir=str(tmp_path))
    for step in (7, 5):
        WandbSink("p", chosen).write(step, {"reward/mean": 0.5})
    set_aside(tmp_path)
    WandbSink("p", chosen)
    first, second, third = (each["id"] for each in begun)
    assert first == second != third and {each["resume"] for each in begun} == {"allow"}
    assert [each["steps"] for each in logged] == [7, 5]


def test_wandb_gets_every_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library runs offline: it keeps the run in a file, which `wandb sync` would send."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with MetricsWriter.open(
        config("model", run__dir=str(tmp_path), telemetry={"wandb_project": "p"}), io.StringIO()
    ) as w:
        w.write(1, VALUES)
        w.write(2, VALUES | {"reward/mean": 0.8125})
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")

    def written() -> bool:
        content = record.read_bytes()
        return all(name.encode() in content for name in VALUES) and b"0.8125" in content

    # wandb 0.31's writer process may end its file a moment after `finish` has returned.
    wait_until(written, 60, "wandb's record of every metric")


def test_progress_lines_are_aligned() -> None:
    stream = io.StringIO()
    progress = Progress(stream, steps=200)
    progress.step(7, VALUES)
    more = {"reward/accuracy": 0.0, "perf/rollout_tokens_per_second": 123456.0, "policy/loss": math.inf}
    progress.step(123, {"reward/mean": -1.0} | more)
    header, *rows = stream.getvalue().splitlines()
    assert {len(row) for row in rows} == {len(header)}
    assert rows[0].startswith("  7/200") and rows[0].endswith("2m10s")
    assert "123k" in rows[1] and "inf" in rows[1]
    assert "\r" not in stream.getvalue()  # no live line without a terminal


def test_graded_rewards_have_no_column_of_accuracies() -> None:
    stream = io.StringIO()
    progress = Progress(stream, 9)
    progress.step(1, VALUES)  # all rewards of a step may happen to be 0 or 1
    progress.step(2, {"reward/mean": 0.7})
    progress.step(3, VALUES)
    verdicts, _, header, *rows = stream.getvalue().splitlines()
    assert " acc " in verdicts and " acc " not in header and len(rows) == 2
    assert {len(row) for row in rows} == {len(header)}


def test_the_speed_of_rollout_is_that_of_the_newest_steps() -> None:
    """In asynchronous training a step's tokens and the seconds of engines are not of the same responses."""
    stream = io.StringIO()
    progress = Progress(stream, 9)
    for seconds in (0.1, 9.9):
        speed = {"perf/rollout_tokens_per_second": 1000 / seconds, "rollout/engine_seconds": seconds}
        progress.step(1, VALUES | speed)
    assert [row.split()[9] for row in stream.getvalue().splitlines()[1:]] == ["10k", "200"]


@pytest.mark.parametrize(
    ("title", "values", "shown"),
    [
        *(("err", {"reward/errors": errors}, shown) for errors, shown in [(0.0, "0"), (7.0, "7"), (1536.0, "2k")]),
        ("err", {}, "-"),
        *(
            ("gnorm", {"policy/grad_norm": norm}, shown)
            for norm, shown in [(0.1234, "0.123"), (12.34, "12.3"), (12345.0, "12.3k"), (2.4e-5, "2e-05")]
        ),
    ],
)
def test_a_cell_shows_its_value_in_its_room(title: str, values: dict[str, float], shown: str) -> None:
    stream = io.StringIO()
    Progress(stream, 9).step(1, VALUES | values)
    header, row = (
        line.replace("kl old", "kl-old").replace("n t/s", "n-t/s").split() for line in stream.getvalue().splitlines()
    )
    assert row[header.index(title)] == shown


def test_no_line_is_wider_than_a_terminal_of_100_columns() -> None:
    """Whatever the values: those of a long run, and any that a diverging one has."""
    for huge in (1e3, 1e9, 1e30, -1e30, math.nan, 12345.678, -12345.678):
        stream = io.StringIO()
        values = dict.fromkeys([column.metric for column in COLUMNS], huge) | {"time/eta": 4e6}
        Progress(stream, steps=99_999).step(12_345, values)
        header, row = stream.getvalue().splitlines()
        assert len(row) == len(header) <= 100


@pytest.mark.parametrize(("reference", "title", "shown"), [(False, "kl old", "2.0e-03"), (True, "kl ref", "7.0e-01")])
def test_the_kl_to_the_reference_is_shown_where_there_is_one(reference: bool, title: str, shown: str) -> None:
    stream = io.StringIO()
    Progress(stream, 9, reference=reference).step(1, {"policy/approx_kl": 0.002, "policy/kl_ref": 0.7})
    header, row = stream.getvalue().splitlines()
    assert title in header and shown in row
    assert header.count(" kl ") == 1


def test_the_live_line_never_mixes_with_the_table() -> None:
    stream = Terminal()
    progress = Progress(stream, steps=9)
    progress.status("step 1: generate")
    progress.step(1, VALUES)
    progress.status("step 2: generate")
    progress.close()
    text = stream.getvalue()
    assert "\r\x1b[2Kstep 1: generate" in text
    live = text.split("\r\x1b[2K")[-2]
    assert live.startswith("step 2: generate  |  reward 0.500  acc 0.250") and len(live) < 80
    for line in text.split("\n")[:-1]:
        assert "generate" not in line.rsplit("\x1b[2K", 1)[-1]
    quiet = io.StringIO()
    Progress(quiet, steps=9).status("nothing")
    assert quiet.getvalue() == ""


def test_columns_show_declared_metrics() -> None:
    from megarl.telemetry.metrics.declarations import REGISTRY

    for column in COLUMNS:
        assert REGISTRY.lookup(column.metric)
        assert len(column.title) <= column.width


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (190, "3m10s"), (7500, "2h05m"), (273600, "3d04h"), (-1, "0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (999, "999"), (999.7, "1k"), (1234567, "1.23M"), (2e9, "2G")]
)
def test_compact_numbers(value: float, text: str) -> None:
    assert compact(value) == text


def events(path: Path) -> list[Event]:
    """The records of an event file (length, its checksum, event, its checksum), up to its present end."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_tensorboard_has_every_step_at_once_and_a_rollback_drops_what_was_beyond(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    (path,) = tmp_path.iterdir()
    sink.write(300, {"reward/mean": 0.5, "time/step": 2.0})
    sink.write(301, {"reward/mean": math.nan})
    sink.roll_back(300)
    first, second, third, last = events(path)  # of the open file: what a killed run leaves
    assert first.file_version == "brain.Event:2"
    assert second.step == 300 and {v.tag: v.simple_value for v in second.summary.value} == {
        "reward/mean": 0.5,
        "time/step": 2.0,
    }
    assert math.isnan(third.summary.value[0].simple_value)
    assert last.step == 301 and last.session_log.status == SessionLog.START
    sink.close()


def test_the_oldest_files_of_tensorboard_are_deleted_also_those_of_an_earlier_start(tmp_path: Path) -> None:
    earlier = tmp_path / "events.out.tfevents.1700000000.host.1.megarl"
    earlier.write_bytes(b"x" * 3000)
    os.utime(earlier, (1_700_000_000, 1_700_000_000))
    sink = TensorBoardSink(tmp_path, limit=4000)
    values = {"reward/mean": 0.5}
    for step in range(1, 11):
        sink.write(step, values)
    assert earlier.exists(), "there is room for both"
    for step in range(11, 401):
        sink.write(step, values)
        assert sum(path.stat().st_size for path in tmp_path.iterdir() if path != earlier) <= 4000 + 8 * 60  # an event
    sink.close()
    assert not earlier.exists()
    files = sorted(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[-2]))
    steps = [event.step for path in files for event in events(path) if event.step]
    assert steps == list(range(401 - len(steps), 401)) and len(steps) > 40, "the newest steps are kept"


def test_the_files_of_many_short_starts_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is ever full, and each start begins a new one."""
    for start in range(60):
        monkeypatch.setattr("megarl.telemetry.sinks.tensorboard.os.getpid", lambda start=start: 1001 + start)
        sink = TensorBoardSink(tmp_path, limit=4000)
        sink.write(start, {"reward/mean": 0.5})
        sink.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    newest = max(tmp_path.iterdir(), key=lambda path: int(path.name.split(".")[-2]))
    assert [event.step for event in events(newest)] == [0, 59]


@pytest.mark.skipif(not tensorboard_package.is_here(), reason=tensorboard_package.MISSING)
def test_tensorboard_itself_shows_the_scalars_and_a_rollback_purges_those_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is killed after step 5, and one that resumes from step 3 writes other values into a file of its own."""
    for start, steps in enumerate((range(1, 6), range(4, 7))):
        monkeypatch.setattr("megarl.telemetry.sinks.tensorboard.os.getpid", lambda start=start: 1001 + start)
        sink = TensorBoardSink(tmp_path)
        if start:
            sink.roll_back(3)
        for step in steps:
            sink.write(step, {"reward/mean": step / 4 + 100 * start, "time/step": 2.0})
        if not start:
            sink.write(5, {"eval/a/greedy": 0.5})
        sink.close()
    found = tensorboard_package.scalars(tmp_path)
    assert found.pop("reward/mean") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 101.0), (5, 101.25), (6, 101.5)]
    assert found.pop("time/step") == [(step, 2.0) for step in range(1, 7)]
    assert not any(found.values()), "what only the discarded steps had is purged too"


def test_a_resumed_summary_counts_on() -> None:
    now = [0.0]
    first = RunSummary(clock=lambda: now[0])
    first.evaluation("before", greedy=0.1, sampled=0.2, n=5)
    first.step({"batch/trained_samples": 8, "time/step": 10.0, "time/overhead": 1.0})
    now[0] = 20.0
    state = json.loads(json.dumps(first.state_dict()))
    now[0] = 100.0
    second = RunSummary(clock=lambda: now[0])
    second.load_state_dict(state)
    now[0] = 107.0
    second.step({"batch/trained_samples": 8, "time/step": 10.0, "time/overhead": 1.0, "total/groups_rolled_back": 4.0})
    written = second.as_dict("finished")
    assert written["steps"] == 2 and written["wall_seconds"] == 27.0 and written["trained_samples"] == 16
    assert written["eval_before"]["n"] == 5 and written["groups_rolled_back"] == 4
    assert written["loop_overhead_share"] == pytest.approx(0.1)


def test_summary_has_exactly_what_was_asked_for() -> None:
    now = [0.0]
    summary = RunSummary(clock=lambda: now[0])
    summary.evaluation("before", greedy=0.1, sampled=0.2, n=500, reward_errors=7)
    for step in range(3):
        summary.step(
            {
                "batch/trained_samples": 8, "batch/trained_tokens": 1000, "batch/response_tokens": 600,
                "time/logprobs": 1.0, "time/update": 3.0, "time/step": 10.0, "time/overhead": 0.5,
                "rollout/engine_seconds": 2.0, "reward/errors": 2.0,
                "mismatch/logprob_abs_diff_mean": 1e-7 * (step + 1), "mismatch/logprob_abs_diff_max": 1e-5 * (step + 1),
            }
        )  # fmt: skip
    summary.evaluation("after", greedy=0.6, sampled=0.5, n=500)
    now[0] = 42.0
    written = summary.as_dict("finished")
    assert written == {
        "steps": 3,
        "wall_seconds": 42.0,
        "eval_before": {"greedy": 0.1, "sampled": 0.2, "n": 500, "reward_errors": 7},
        "eval_after": {"greedy": 0.6, "sampled": 0.5, "n": 500, "reward_errors": 0},
        "trained_samples": 24,
        "reward_errors": 6,
        "tokens_per_second": {"trainer": 250.0, "rollout": 300.0},
        "loop_overhead_share": pytest.approx(0.05),
        "logprob_abs_diff": {
            "first": {"mean": pytest.approx(1e-7), "max": pytest.approx(1e-5)},
            "last": {"mean": pytest.approx(3e-7), "max": pytest.approx(3e-5)},
        },
        "exit": "finished",
    }


def test_summary_of_a_run_that_never_stepped() -> None:
    content = RunSummary().as_dict("failed")
    assert content["steps"] == 0 and content["loop_overhead_share"] is None
    assert content["logprob_abs_diff"]["first"] == {"mean": None, "max": None}
    assert content["eval_before"] is None and content["exit"] == "failed"


# --- disks that take nothing


class FullDisk:
    """Stands for the file of a sink: it takes `room` bytes, then nothing until there is more room."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytearray) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._file.write(bytes(data[: self.room]))
        self.room -= written
        return written

    def close(self) -> None:
        self._file.close()


@given(st.lists(st.integers(0, 400), max_size=8), st.integers(0, 300))
def test_no_line_is_lost_whatever_the_disk_takes_for_a_time(room_by_step: list[int], first: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sink = JsonlSink(Path(directory) / "metrics.jsonl")
        sink._file.close()
        disk = FullDisk(sink.path, first)
        sink._file = disk  # type: ignore[assignment]
        for step, room in enumerate(room_by_step):
            disk.room = room
            try:
                sink.write(step, VALUES)
            except OSError:
                assert sink.waiting_bytes
        whole = sink.path.stat().st_size + sink.waiting_bytes
        disk.room = 10**6
        sink.close()
        assert [line["step"] for line in lines(sink.path)] == list(range(len(room_by_step)))
        assert sink.path.stat().st_size == whole


def test_a_full_disk_is_reported_once_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    chosen = config("model", run__dir=str(tmp_path), telemetry={"samples_per_step": 1})
    terminal = io.StringIO()
    writer = MetricsWriter.open(chosen, terminal)
    full = [sink for sink in (*writer._sinks, writer._samples) if isinstance(sink, JsonlSink)]
    disks = [FullDisk(sink.path, 0) for sink in full]
    for sink, disk in zip(full, disks, strict=True):
        sink._file.close()
        sink._file = disk  # type: ignore[assignment]
    for step in (1, 2, 3):
        writer.write(step, VALUES)
        writer.sample(step, lambda: {"prompt": "1+1="})
    writer.flush()
    assert writer.failures == 6 and set(writer.waiting()) == {"metrics.jsonl", "samples.jsonl"}
    said = terminal.getvalue()
    assert said.count("warning: ") == 1 and "No space left on device" in said and "the run continues" in said
    for disk in disks:
        disk.room = 10**6
    writer.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [line["step"] for line in lines(tmp_path / name)] == [1, 2, 3]


def test_lines_that_are_lost_for_good_are_reported_at_the_end(tmp_path: Path) -> None:
    chosen = config("model", run__dir=str(tmp_path), telemetry={"tensorboard": False})
    for line in (b"", b"a line\n"):
        terminal = io.StringIO()
        writer = MetricsWriter.open(chosen, terminal)
        (sink,) = writer._sinks
        assert isinstance(sink, JsonlSink)
        sink._file.close()
        sink._file = FullDisk(sink.path, 0)  # type: ignore[assignment]
        sink._waiting += line
        writer.close()
        assert ("metrics.jsonl could not be written" in terminal.getvalue()) is bool(line)
        assert bool(terminal.getvalue()) is bool(line)


def test_memory_for_lines_that_wait_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "WAITING_BYTES", 100)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink._file.close()
    sink._file = FullDisk(sink.path, 0)  # type: ignore[assignment]
    for step in range(9):
        with pytest.raises(OSError, match=r"No space left|this line is lost"):
            sink.write(step, VALUES)
    assert sink.waiting_bytes < 400


def test_samples_have_a_bound_that_the_config_sets(tmp_path: Path) -> None:
    for number, gib in enumerate((800 / 2**30, 0.0)):
        chosen = config("model", run__dir=str(tmp_path / f"{number}"), telemetry={"keep_gib": gib})
        with MetricsWriter.open(chosen, io.StringIO()) as writer:
            for step in range(200):
                writer.sample(step, lambda: {"prompt": "1+1="})
    kept = list(read_lines(tmp_path / "0" / "samples.jsonl"))
    assert 500 < sum(len(line) + 1 for line in kept) <= 800 and json.loads(kept[-1])["step"] == 199
    assert len(lines(tmp_path / "1" / "samples.jsonl")) == 200 and len(list((tmp_path / "1").glob("samples*"))) == 1


def test_a_part_that_cannot_be_begun_is_reported_and_no_line_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path / "samples.jsonl", 96)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        for step in range(3):
            with pytest.raises(OSError, match="read-only"):
                sink.write_object({"step": step})
    for step in range(3, 6):
        sink.write_object({"step": step})
    sink.close()
    assert [json.loads(line)["step"] for line in read_lines(sink.path)] == list(range(6))
    assert len(older_parts(sink.path)) == 3


@pytest.mark.parametrize("cut", [b"", b'{"step": 1}\n', b'{"step": 1}\n{"st', b'{"st'])
def test_an_incomplete_line_is_cut_off_before_the_next_one(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(cut)
    sink = JsonlSink(path)
    sink.write(7, {})
    sink.close()
    assert [line["step"] for line in lines(path)][-1] == 7
    assert len(lines(path)) == cut.count(b"\n") + 1


def test_a_part_of_a_line_that_a_resume_has_left_is_removed_before_the_next_one(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {})
    sink.write(2, {})
    os.truncate(sink.path, sink.path.stat().st_size - 5)
    sink.roll_back(1)
    sink.write(3, {})
    sink.close()
    assert [line["step"] for line in lines(sink.path)] == [1, 3]


def test_tensorboard_begins_a_new_file_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"reward/mean": 0.5})

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sink._writer, "flush", full)
    with pytest.raises(OSError, match="No space"):
        sink.write(2, {"reward/mean": 0.5})
    sink.write(3, {"reward/mean": 0.5})
    sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    newest = max(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert [event.step for event in events(newest)] == [0, 3]


# --- a sink that is slow, hangs, or has a mistake


class HeldSink:
    """A service that takes nothing until it is released."""

    name = "HeldSink"

    def __init__(self) -> None:
        self.released, self.entered = threading.Event(), threading.Event()
        self.steps: list[int] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.released.wait(60)
        self.steps.append(step)

    def roll_back(self, step: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def held() -> Iterator[HeldSink]:
    sink = HeldSink()
    yield sink
    sink.released.set()


def writer_with(sink: Sink, run_dir: Path, terminal: io.StringIO, **timeouts: float) -> MetricsWriter:
    """A writer of samples.jsonl and metrics.jsonl, and of `sink` before the latter."""
    files = [JsonlSink(run_dir / name) for name in ("samples.jsonl", "metrics.jsonl")]
    return MetricsWriter([sink, files[1]], files[0], Progress(terminal, 4), run_dir, TimeoutsConfig(**timeouts))


def test_a_step_does_not_wait_for_a_slow_sink_and_positions_do(tmp_path: Path, held: HeldSink) -> None:
    terminal = io.StringIO()
    writer = writer_with(held, tmp_path, terminal)
    values = dict(VALUES)
    for step in (1, 2, 3):
        writer.write(step, values)
        writer.sample(step, lambda step=step: {"prompt": "1+1="})  # type: ignore[misc]
        writer.write_summary(RunSummary(), "running")
    values["reward/mean"] = 9.0  # what the caller does with its values later is none of the writer's business
    assert held.entered.wait(60) and held.steps == [] and (tmp_path / "metrics.jsonl").read_text() == ""
    assert len(terminal.getvalue().splitlines()) == 4, "the table is printed at once"
    threading.Timer(0.1, held.released.set).start()
    assert writer.waiting() == {"metrics.jsonl": 0, "samples.jsonl": 0}
    assert held.steps == [1, 2, 3]
    ends = positions(tmp_path)
    assert [(each["step"], each["reward/mean"]) for each in lines(tmp_path / "metrics.jsonl")] == [
        (step, 0.5) for step in (1, 2, 3)
    ]
    assert [each["step"] for each in lines(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert json.loads((tmp_path / "summary.json").read_text())["exit"] == "running"
    writer.close()
    assert positions(tmp_path) == ends, "nothing was left to write"


def test_a_sink_that_hangs_is_named_by_whoever_waits_and_keeps_no_run_from_its_end(
    tmp_path: Path, held: HeldSink
) -> None:
    terminal = io.StringIO()
    writer = writer_with(held, tmp_path, terminal, save_s=0.2, shutdown_s=0.2)
    writer.write(1, VALUES)
    for wait in (writer.flush, writer.waiting, lambda: writer.roll_back(0)):
        with pytest.raises(WriterHungError, match=r"the metrics writer has written .* it is busy with HeldSink"):
            wait()
    writer.write_exit(ExitRecord("finished", 1, ""))
    assert json.loads((tmp_path / "exit.json").read_text())["status"] == "finished"
    writer.close()
    reported = [line for line in terminal.getvalue().splitlines() if line.startswith("warning: the metrics writer has")]
    assert len(reported) == writer.failures == 2 and "timeouts.shutdown_s" in reported[1]


def test_the_exit_record_comes_after_everything_that_was_given_before(tmp_path: Path, held: HeldSink) -> None:
    writer = writer_with(held, tmp_path, io.StringIO())
    writer.write(1, VALUES)
    threading.Timer(0.1, held.released.set).start()
    writer.write_exit(ExitRecord("finished", 1, ""))
    assert [each["step"] for each in lines(tmp_path / "metrics.jsonl")] == [1]
    writer.close()


def test_a_mistake_in_a_line_ends_the_run_as_ever(tmp_path: Path) -> None:
    """JSON has no sets: no disk is to blame, and nobody may miss it."""
    writer = MetricsWriter.open(
        config("model", run__dir=str(tmp_path), telemetry={"samples_per_step": 1}), io.StringIO()
    )
    writer.sample(1, lambda: {"prompt": {1}})
    with pytest.raises(TypeError, match="set"):
        writer.flush()
    writer.sample(1, lambda: {"prompt": {1}})
    with pytest.raises(TypeError, match="set"):
        writer.close()
