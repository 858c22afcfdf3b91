"""The report of the benchmarks: results, exit status, JSON, and a quick run that judges nothing."""

import argparse
import json
import math
from pathlib import Path

import pytest

from benchmarks.lib.report import NOT_MEASURED, Ratio, finish, new_parser


@pytest.mark.parametrize(
    ("ratio", "bound", "at_least", "ok"),
    [
        (1.6, 1.6, True, True), (1.59, 1.6, True, False), (1.3, 1.3, False, True), (1.31, 1.3, False, False),
        (9.0, None, False, True), (math.nan, None, False, False), (math.inf, 1.0, True, False),
    ],
)  # fmt: skip
def test_results(ratio: float, bound: float | None, at_least: bool, ok: bool) -> None:
    assert Ratio("x", ratio, bound, at_least).ok is ok


def parse(*arguments: str) -> argparse.Namespace:
    return new_parser(None).parse_args(arguments)


def test_a_missed_bound_is_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Ratio("good", 2.0, 1.6, True, {"tokens": 7}), Ratio("bad", 2.0, 1.6)
    options = parse("--json", str(tmp_path / "rows.json"))
    assert finish([good], options) == 0 and finish([good, bad], options) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["good", "2.000", ">=", "1.6", "ok"] and lines[2] == "    tokens: 7"
    assert lines[-1].split() == ["bad", "2.000", "<=", "1.6", "MISSED"]
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"name": "good", "ratio": 2.0, "bound": 1.6, "ok": True, "details": {"tokens": 7}},
        {"name": "bad", "ratio": 2.0, "bound": 1.6, "ok": False, "details": {}},
    ]


def test_a_quick_run_has_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse("--quick", "--json", str(tmp_path / "rows.json"))
    assert finish([Ratio("bad", 2.0, 1.6), Ratio("good", 1.0, 1.6)], options) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == NOT_MEASURED and "MISSED" not in out and "ok" not in out
    assert [row["ok"] for row in json.loads((tmp_path / "rows.json").read_text())] == [None, None]
