"""Thousands of steps of a run's files: those that rotate stay bounded, and writing costs no memory."""

import io
import json
import threading
from pathlib import Path
from unittest import mock

import psutil
import pytest

from megarl.checkpoint.save import history
from megarl.checkpoint.save.history import positions, roll_back
from megarl.common.rundir import notices
from megarl.common.rundir.notices import NoticeWatch, write_notice
from megarl.common.rundir.rotating_lines import read_lines
from megarl.telemetry.sinks.sinks import MetricsWriter
from tests.support.measures.growth import held_bytes, slopes_over
from tests.support.trainer.configs import config

pytestmark = pytest.mark.slow

EVERY = 500
VALUES = {"reward/mean": 0.5, "time/step": 1.25}
BOUND = 5_000  # bytes of each file that rotates, which is full after some hundred steps


@pytest.mark.parametrize("steps", [20_000])
def test_the_files_of_a_run_do_not_grow(tmp_path: Path, steps: int) -> None:
    telemetry = {"keep_gib": BOUND / 2**30}
    chosen = config("model", run={"dir": str(tmp_path), "steps": steps}, telemetry=telemetry)
    (tmp_path / "logs").mkdir()
    writer, shown = MetricsWriter.open(chosen, io.StringIO()), list[str]()
    watch = NoticeWatch(tmp_path, shown.append, interval_s=600.0)

    def take_step(step: int) -> None:
        writer.write(step, VALUES, terminal=False)
        writer.sample(step, lambda: {"prompt": "1+1=", "response": "x" * 40})
        if step % 20 == 0:
            write_notice(tmp_path, f"at step {step}" + "." * 100)
            watch._look()
        if step % 400 == 399:  # the run is resumed, and makes the steps again
            writer.write(step, VALUES, terminal=False)
            writer.flush()
            ends = positions(tmp_path)
            roll_back(tmp_path, ends | {"metrics.jsonl": ends["metrics.jsonl"] - 1000})
            writer.roll_back(step)

    def sizes() -> dict[str, float]:
        writer.flush()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {
            "bytes": sum(path.stat().st_size for path in files),
            "files": len(files),
            "bytes held": held_bytes(writer._sinks, writer._samples, vars(watch)) + held_bytes(notices._waiting),
            "threads": threading.active_count(),
            "descriptors": psutil.Process().num_fds(),
        }

    with (
        mock.patch.object(notices, "FULL_BYTES", BOUND),
        mock.patch.object(history, "ROLLED_BACK_BYTES", BOUND),
    ):
        slopes = slopes_over(steps, EVERY, take_step, sizes)
    watch.close()
    writer.close()
    assert len(shown) == steps / 20
    kept = [json.loads(line)["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert kept == sorted(kept) and kept[-1] > steps - 50 and len(kept) > 30, "the newest lines are kept"
    assert {path.name.split(".")[0] for path in tmp_path.rglob("*.jsonl")} == {
        "metrics", "samples", "rolled_back", "notices",
    }  # fmt: skip
    assert slopes["bytes"] < 1 and slopes["bytes held"] < 1, slopes
    assert all(slopes[name] < 20 / steps for name in ("files", "threads", "descriptors")), slopes
