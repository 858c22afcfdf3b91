from __future__ import annotations

import io
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from megarl.telemetry.metrics import UndeclaredMetricError
from megarl.telemetry.progress import COLUMNS, Progress, compact, duration
from megarl.telemetry.sinks import MetricsWriter
from megarl.telemetry.summary import RunSummary
from megarl.telemetry.tensorboard import TensorBoardSink
from tests.support.configs import config
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
        writer.sample(2, {"prompt": "1+1=", "response": "zwei ü", "reward": 1.0})
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
            writer.sample(step, {"never": "written"})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "tensorboard").exists() and not (tmp_path / "samples.jsonl").exists()


def test_wandb_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        MetricsWriter.open(config("model", run__dir=str(tmp_path), telemetry={"wandb_project": "p"}), io.StringIO())


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
    wait_until(written, 20, "wandb's record of every metric")


def test_progress_lines_are_aligned() -> None:
    stream = io.StringIO()
    progress = Progress(stream, steps=200)
    progress.step(7, VALUES)
    progress.step(123, {"reward/mean": -1.0, "perf/rollout_tokens_per_second": 123456.0, "policy/loss": math.inf})
    header, *rows = stream.getvalue().splitlines()
    assert {len(row) for row in rows} == {len(header)}
    assert rows[0].startswith("  7/200") and rows[0].endswith("2m10s")
    assert "123k" in rows[1] and "inf" in rows[1]
    assert "\r" not in stream.getvalue()  # no live line without a terminal


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
    from megarl.telemetry.declarations import REGISTRY

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


def test_a_resumed_summary_counts_on(tmp_path: Path) -> None:
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
    written = second.write(tmp_path / "summary.json", "finished")
    assert written["steps"] == 2 and written["wall_seconds"] == 27.0 and written["trained_samples"] == 16
    assert written["eval_before"]["n"] == 5 and written["groups_rolled_back"] == 4
    assert written["loop_overhead_share"] == pytest.approx(0.1)


def test_summary_has_exactly_what_was_asked_for(tmp_path: Path) -> None:
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
    written = summary.write(tmp_path / "runs" / "summary.json", "finished")
    assert json.loads((tmp_path / "runs" / "summary.json").read_text()) == written
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


def test_summary_of_a_run_that_never_stepped(tmp_path: Path) -> None:
    content = RunSummary().as_dict("failed")
    assert content["steps"] == 0 and content["loop_overhead_share"] is None
    assert content["logprob_abs_diff"]["first"] == {"mean": None, "max": None}
    assert content["eval_before"] is None and content["exit"] == "failed"
