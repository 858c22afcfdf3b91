"""Result files go back with a run that resumes."""

from __future__ import annotations

import json
from pathlib import Path

from megarl.checkpoint.save.history import ROLLED_BACK, positions, roll_back


def test_result_files_go_back_to_the_byte(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    committed = positions(tmp_path)
    before = metrics.read_bytes()
    with metrics.open("a") as file:
        file.write('{"step": 3, "policy/loss": 0.5}\n{"step": 4, "pol')  # the kill cut a line short
    (tmp_path / "samples.jsonl").write_text('{"step": 3}\n')  # was not there yet
    assert roll_back(tmp_path, committed) == 2
    assert metrics.read_bytes() == before and (tmp_path / "samples.jsonl").read_bytes() == b""
    assert [json.loads(line) for line in (tmp_path / ROLLED_BACK).read_text().splitlines()] == [
        {"file": "metrics.jsonl", "step": 3, "policy/loss": 0.5},
        {"file": "samples.jsonl", "step": 3},
    ]
    assert roll_back(tmp_path, committed) == 0
