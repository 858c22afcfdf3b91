"""Loops of an agent worker that fork or flood: they cost nothing, and a child never answers in the worker's name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.hostile_worker import GROUPS, HOWS, LINE, LINES, LOG_BYTES

pytestmark = pytest.mark.slow

SAMPLES = 4


@pytest.mark.parametrize("how", HOWS)
def test_a_worker_whose_loops_fork_or_flood_goes_on_and_each_sample_has_one_answer(how: str, tmp_path: Path) -> None:
    """The worker is a process of its own, with a real tokenizer and real reward processes.

    Without the guard a child would go on with all loops of the worker: it would ask engines again, answer for the
    groups a second time, and end with a report of its own.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile_worker", str(tmp_path), how],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    logs = sorted((tmp_path / "logs").glob("worker-0.log*"))
    log = "".join(each.read_text(errors="replace") for each in logs)
    assert done.returncode == 0, done.stderr[-3000:] + log[-3000:]
    (line,) = done.stdout.splitlines()  # a child would print another one
    found = json.loads(line)
    assert found["rows"] == [[group, sample, "ok", 1.0] for group in GROUPS for sample in range(SAMPLES)]
    assert len(found["asked"]) == len(set(found["asked"])) == len(GROUPS) * SAMPLES
    assert found["lost"] == 0 and found["left"] == [], "the worker and nothing else has ended"
    if how == "flood":
        kept = sum(each.stat().st_size for each in logs)
        assert LINE[:100] in log and kept < 3 * LOG_BYTES < len(LINE) * LINES, f"{kept} bytes are kept"
    else:
        told = "a child that an agent loop had forked came back from the loop: it was ended"
        assert log.count(told) == len(GROUPS)
