"""The command line: mistakes in one message, and the pages that are made from the code."""

import json
from pathlib import Path

import pytest

from megarl.cli import main
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import tree, write_problems


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("plan") / "model", num_hidden_layers=4)


def test_plan_reports_mistakes_in_one_message(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree(model, write_problems(tmp_path / "prompts.jsonl", 1))))
    assert main.main(["plan", "--config", str(path), "trainer.gpus=3", "trainer.parallel.tensor=2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megarl: ") and "trainer.gpus: 3 is not a multiple" in error
    assert "Traceback" not in error


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    text = capsys.readouterr().out
    assert all(command in text for command in ("plan", "doctor", "top"))


@pytest.mark.parametrize("given", [[], ["convert"]])
def test_without_a_command_the_help_is_printed(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(given) == 2
    reported = capsys.readouterr()
    program = " ".join(["megarl", *given])
    assert reported.err.startswith(f"usage: {program} [-h]") and "error" not in reported.err and reported.out == ""
    assert all(f"\n    {name} " in reported.err for name in (("import", "verify") if given else ("train", "doctor")))


def test_overrides_may_stand_on_both_sides_of_an_option(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(tree(model, write_problems(tmp_path / "prompts.jsonl", 1))))
    wrong = ["trainer.gpus=3", "--dry-run", "trainer.parallel.tensor=2"]
    with pytest.raises(SystemExit, match="2"):  # a dry run ends as a rank does
        main.main(["train", "--config", str(path), *wrong])
    assert "trainer.gpus: 3 is not a multiple" in capsys.readouterr().err
    for unknown in ("run.steps", "--no-such-option"):
        with pytest.raises(SystemExit):
            main.main(["train", "--config", str(path), "run.steps=3", "--dry-run", unknown])
        said = capsys.readouterr().err
        assert f"unrecognized arguments: {unknown}" in said
        assert "set a key of the config as section.key=value" in said
