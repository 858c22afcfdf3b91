"""The check of data files before a start: every bad row with its file, line and column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.commands import cli
from megarl.common.errors import ConfigError
from megarl.data import check_files
from megarl.data.check_files import check_data_files
from tests.support.configs import config, tree, write_problems
from tests.support.tiny import make_tiny_model

BAD = '{"problem": 3, "answer": "1"}\n\n{"problem": "a", "answer" "1"}\n{"problem": "a", "answer": "1"}\n[1]\n'


def test_sound_files_are_no_problem(tmp_path: Path) -> None:
    check_data_files(config("model", write_problems(tmp_path / "good.jsonl", 8)))


def test_all_bad_rows_of_all_sets_are_told(tmp_path: Path) -> None:
    good, bad = write_problems(tmp_path / "good.jsonl", 8), tmp_path / "bad.jsonl"
    bad.write_text(good.read_text() + BAD)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    sets = [{"name": "held", "path": str(empty)}, {"name": "gone", "path": str(tmp_path / "gone.jsonl")}]
    with pytest.raises(ConfigError) as raised:
        check_data_files(config("model", bad, evaluation__sets=sets))
    assert raised.value.problems == [
        f"data: {bad}:9: field 'problem' must be a non-empty string, not 3",
        f"data: {bad}:11: not JSON: Expecting ':' delimiter at column 27",
        f"data: {bad}:13: must be a JSON object, not list",
        f"evaluation.sets.0: {empty} holds no rows",
        f"evaluation.sets.1: data file {tmp_path / 'gone.jsonl'} does not exist",
    ]


def test_with_a_changed_field_the_message_is_about_that_field(tmp_path: Path) -> None:
    """The row would be recognised without it, so it must not be said that it has no known format."""
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    check_data_files(config("model", path))
    with pytest.raises(ConfigError) as raised:
        check_data_files(config("model", path, data__prompt_field="qestion"))
    [problem] = raised.value.problems
    assert "there is no field 'qestion' (data.prompt_field)" in problem and "['answer', 'question']" in problem
    assert "unknown format" not in problem


def test_of_very_many_bad_rows_some_are_told_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.jsonl"
    different = "".join(f'{{"problem": {number}, "answer": "1"}}\n' for number in range(30))
    bad.write_text(write_problems(tmp_path / "good.jsonl", 1).read_text() + different)
    with pytest.raises(ConfigError) as raised:
        check_data_files(config("model", bad))
    assert len(raised.value.problems) == 11 and raised.value.problems[-1] == f"data: 20 more rows of {bad} are wrong"
    monkeypatch.setattr(check_files, "MOST_ROWS", 1)
    check_data_files(config("model", bad))


def test_rows_with_the_same_problem_are_one_line(tmp_path: Path) -> None:
    path = write_problems(tmp_path / "many.jsonl", 64)
    with pytest.raises(ConfigError) as raised:
        check_data_files(config("model", path, data__prompt_field="question"))
    [problem] = raised.value.problems
    assert problem.startswith(f"data: {path}:1: there is no field 'question' (data.prompt_field)")
    assert problem.endswith(" (and in 63 more: 2, 3, 4, 5, 6, ...)")
    path.write_text(write_problems(tmp_path / "good.jsonl", 1).read_text() + "no\n[1]\nno\n")
    with pytest.raises(ConfigError) as raised:
        check_data_files(config("model", path))
    first, second = raised.value.problems
    assert first.startswith(f"data: {path}:2: not JSON: ") and first.endswith(" (and in 1 more: 4)")
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
    assert cli.main([command, "--config", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("megarl: 3 problems\n  - data: ") and "bad.jsonl:11: not JSON" in told
    assert not (tmp_path / "run").exists()
