"""Loops of an agent worker that flood its output: they cost nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.rollout.hostile_worker import GROUPS, LINE, LINES, LOG_BYTES

pytestmark = pytest.mark.slow

SAMPLES = 4


def test_a_worker_whose_loops_flood_goes_on_and_each_sample_has_one_answer(tmp_path: Path) -> None:
    """The worker is a process of its own, with a real tokenizer and real reward processes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.rollout.hostile_worker", str(tmp_path)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    logs = sorted((tmp_path / "logs").glob("worker-0.log*"))
    log = "".join(each.read_text(errors="replace") for each in logs)
    assert done.returncode == 0, done.stderr[-3000:] + log[-3000:]
    found = json.loads(done.stdout)
    assert found["rows"] == [[group, sample, "ok", 1.0] for group in GROUPS for sample in range(SAMPLES)]
    assert len(found["asked"]) == len(set(found["asked"])) == len(GROUPS) * SAMPLES
    assert found["lost"] == 0 and found["left"] == [], "the worker and nothing else has ended"
    kept = sum(each.stat().st_size for each in logs)
    assert LINE[:100] in log and kept < 3 * LOG_BYTES < len(LINE) * LINES, f"{kept} bytes are kept"
