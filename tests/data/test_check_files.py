"""The check of data files before a start: every bad row with its file, line and column."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.cli import main
from megarl.common.errors import Findings
from megarl.config.derived.datasets import all_sets
from megarl.config.schema import Config
from megarl.data import check_files
from megarl.data.check_files import ReportMistake, data_file_findings
from tests.support.checkout import environment
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import config, tree, write_problems

BAD = '{"problem": 3, "answer": "1"}\n\n{"problem": "a", "answer" "1"}\n{"problem": "a", "answer": "1"}\n[1]\n'


def findings(chosen: Config, report: ReportMistake | None = None) -> Findings:
    return data_file_findings(all_sets(chosen), report)


def test_sound_files_are_no_problem(tmp_path: Path) -> None:
    assert findings(config("model", write_problems(tmp_path / "good.jsonl", 8))).problems == []


def test_all_bad_rows_of_all_sets_are_reported(tmp_path: Path) -> None:
    good, bad = write_problems(tmp_path / "good.jsonl", 8), tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + BAD)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    sets = [{"name": "held", "path": str(empty)}, {"name": "gone", "path": str(tmp_path / "gone.jsonl")}]
    problems = findings(config("model", bad, evaluation__sets=sets)).problems
    assert problems == [
        f"data: {bad}:9: field 'problem' must be a non-empty string, not 3",
        f"data: {bad}:11:27: not JSON: Expecting ':' delimiter",
        f"data: {bad}:13: must be a JSON object, not list",
        f"evaluation.sets.0: {empty} holds no rows",
        f"evaluation.sets.1: data file {tmp_path / 'gone.jsonl'} does not exist",
    ]


def test_with_a_changed_field_the_message_is_about_that_field(tmp_path: Path) -> None:
    """The row would be recognised without it, so it must not be said that it has no known format."""
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    assert findings(config("model", path)).problems == []
    [problem] = findings(config("model", path, data__prompt_field="qestion")).problems
    assert "there is no field 'qestion' (data.prompt_field)" in problem and "['answer', 'question']" in problem
    assert "unknown format" not in problem


def with_mistakes(path: Path, count: int) -> list[str]:
    """Write a good row and `count` rows of two kinds of mistakes in turn; return the latter as they are reported."""
    good = '{"problem": "a", "answer": "1"}\n'
    path.write_text(good + "".join(f'{{"problem": {n}, "answer": "1"}}\n[1}}\n' for n in range(count // 2)))
    return [
        text
        for n in range(count // 2)
        for text in (
            f"{path}:{2 + 2 * n}: field 'problem' must be a non-empty string, not {n}",
            f"{path}:{3 + 2 * n}:3: not JSON: Expecting ',' delimiter",
        )
    ]


def test_of_each_kind_of_mistake_the_first_rows_are_reported_and_all_are_counted(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    with_mistakes(bad, 60)
    problems = findings(config("model", bad)).problems
    left = "and 20 more (megarl plan --all-mistakes prints each)"
    fields, syntax = (problem.split("\n      ") for problem in problems)
    numbers = [f"{bad}:{2 + 2 * n}, not {n}" for n in range(10)]
    assert fields == ["data: 30 rows: field 'problem' must be a non-empty string", *numbers, left]
    places = [f"{bad}:{3 + 2 * n}:3" for n in range(10)]
    assert syntax == ["data: 30 rows: not JSON: Expecting ',' delimiter", *places, left]


def test_every_mistake_of_the_whole_file_is_reported_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.jsonl"
    expected = with_mistakes(bad, 60)
    monkeypatch.setattr(check_files, "MOST_ROWS", 1)
    assert findings(config("model", bad)).problems == []
    reported: list[str] = []
    problems = findings(config("model", bad), lambda mistake: reported.append(str(mistake))).problems
    assert reported == expected
    assert [problem.split("\n      ")[-1] for problem in problems] == ["and 20 more"] * 2


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_file_with_more_rows_than_are_checked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = write_problems(tmp_path / "many.jsonl", 9)
    if suffix == "parquet":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path = tmp_path / "many.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    held = [{"name": name, "path": str(path), "limit": limit} for name, limit in (("few", 8), ("many", 9))]
    monkeypatch.setattr(check_files, "MOST_ROWS", 8)
    note = f"{path}: the first 8 rows were checked; megarl plan --all-mistakes reads all"
    assert findings(config("model", path, evaluation__sets=held)).notes == [note]
    assert findings(config("model", path), lambda _: None).notes == []
    monkeypatch.setattr(check_files, "MOST_ROWS", 9)
    assert findings(config("model", path)).notes == []


def test_rows_that_no_evaluation_uses_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = write_problems(tmp_path / "few.jsonl", 8), write_problems(tmp_path / "many.jsonl", 9)
    monkeypatch.setattr(check_files, "MOST_ROWS", 8)
    for limit, notes in ((7, 0), (9, 1), (None, 1)):
        held = [{"name": "held", "path": str(many), "limit": limit}]
        assert len(findings(config("model", few, evaluation__sets=held)).notes) == notes


def test_the_memory_does_not_grow_with_the_mistakes(tmp_path: Path) -> None:
    bad, peaks, reported = tmp_path / "bad.jsonl", [], []
    for count in (2_000, 20_000):
        with_mistakes(bad, count)
        reported.append(0)

        def report(_: object) -> None:
            reported[-1] += 1

        tracemalloc.start()
        assert findings(config("model", bad), report).problems
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert reported == [2_000, 20_000]
    # The index of a file has 8 bytes for each of its rows; with a list of the mistakes it would be 100 at least.
    assert peaks[1] - peaks[0] < 18_000 * 20


def test_rows_with_the_same_problem_are_together(tmp_path: Path) -> None:
    path = write_problems(tmp_path / "many.jsonl", 64)
    [problem] = findings(config("model", path, data__prompt_field="question")).problems
    assert problem.startswith("data: 64 rows: there is no field 'question' (data.prompt_field)")
    assert problem.count("; the row has ['answer', 'problem']\n") == 1  # all rows have the same fields
    assert f"\n      {path}:10\n      and 54 more" in problem
    [problem] = findings(config("model", path, data__prompt_field="problm")).problems
    assert "; the row has ['answer', 'problem']; did you mean 'problem'?\n" in problem
    path.write_text(write_problems(tmp_path / "good.jsonl", 1).read_text() + "no\n[1]\nno\n")
    first, second = findings(config("model", path)).problems
    assert first == f"data: 2 rows: not JSON: Expecting value\n      {path}:2:1\n      {path}:4:1"
    assert second == f"data: {path}:3: must be a JSON object, not list"


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_command_tells_them_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, data = make_tiny_model(tmp_path / "model"), tmp_path / "bad.jsonl"
    data.write_text(write_problems(tmp_path / "good.jsonl", 8).read_text() + BAD)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree(model, data, run__dir=str(tmp_path / "run"))))
    capsys.readouterr()  # what making the model has shown
    assert main.main([command, "--config", str(path)]) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("megarl: 3 problems\n  - data: ") and "bad.jsonl:11:27: not JSON" in reported
    assert not (tmp_path / "run").exists()
    assert main.main([command, "--config", str(path), "--all-mistakes"]) == 2
    printed = capsys.readouterr()
    assert printed.err == reported
    assert [line.partition(": ")[0] for line in printed.out.splitlines()] == [f"{data}:{n}" for n in (9, "11:27", 13)]


@pytest.mark.slow
def test_the_list_may_end_before_its_reader_has_read_it(tmp_path: Path) -> None:
    model, data, path = make_tiny_model(tmp_path / "model"), tmp_path / "bad.jsonl", tmp_path / "run.yaml"
    with_mistakes(data, 20_000)
    path.write_text(json.dumps(tree(model, data, run__dir=str(tmp_path / "run"))))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megarl", "plan", "--config", str(path), "--all-mistakes"]
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=environment()
    )
    os.close(writer)
    assert ended.returncode == 2 and "megarl: 2 problems\n  - data: 10000 rows: " in ended.stderr
    assert "Broken pipe" not in ended.stderr
