"""The benchmark of host costs runs, on few layers. What does not depend on time must hold here too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sync_scale import MODELS, digest_rows, fill_row

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # it starts vLLM
def test_it_measures_every_row(tmp_path: Path) -> None:
    """The benchmark runs in a process of its own, because vLLM's groups are global."""
    command = [sys.executable, "benchmarks/sync_scale.py", "--layers", "2", "--runs", "3", "--model", MODELS[0]]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (tmp_path / "rows.json").exists(), done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    engine = f"engine {MODELS[0]}"
    assert set(rows) == {
        "digest operations", "digest temporaries", f"bucket fill {MODELS[0]}", f"sender {MODELS[0]}",
        "store requests", "store requests per bucket", "store CPU, 128 members", "store CPU per member",
        f"{engine}, in place", f"{engine}, in place, first sync", f"{engine}, layer-wise reload",
    }  # fmt: skip
    assert done.returncode == (0 if all(row["ok"] for row in rows.values()) else 1)
    assert rows["store requests"]["ok"] and rows["store requests per bucket"]["ok"]
    sender = rows[f"sender {MODELS[0]}"]
    assert sender["ratio"] > 0 and sender["details"]["tensors"] == 2 * (3 * 128 + 9) + 3
    # Far from each other, so that a noisy machine does not matter: on one with much other load the median of later
    # syncs in place is 0.5 times a plain load, and a reload 6 times.
    in_place = rows[f"{engine}, in place"]
    assert in_place["bound"] == 1.15 and in_place["ok"], in_place
    assert 0 < in_place["ratio"] < rows[f"{engine}, layer-wise reload"]["ratio"]


@pytest.mark.parametrize("name", MODELS)
def test_buckets_of_the_large_models_are_full(name: str) -> None:
    row = fill_row(name, None)
    assert row.ok and row.details["tensors"] == {"Qwen3-30B-A3B": 18_867, "Qwen3-235B-A22B": 36_945}[name]


def test_a_missed_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sync_scale.DIGEST_OPERATIONS", 10)
    operations, temporaries = digest_rows(2**22)
    assert not operations.ok and temporaries.ok
