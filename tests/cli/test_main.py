"""The command line: mistakes in one message, and the pages that are made from the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megarl.checkpoint.convert import cli as command_line
from megarl.cli import main
from megarl.run.start import main as rank_main
from tests.support.checkout import ROOT
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import tree, write_problems
from tools.docs.options import keys_page


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


def test_the_readmes_commands_are_parsed() -> None:
    """They work as pasted: the block begins with the activation, without which there is no `megarl`."""
    (block,) = re.findall(r"^## Commands\n\n```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.M)
    first, *lines = [line for line in block.splitlines() if not line.startswith("#")]
    assert first == ". .venv/bin/activate"
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len([main._parse(arguments).run for program, *arguments in commands if program == "megarl"]) >= 8
    scripts = {"tools/checkpoint/convert.py", "examples/rl/train_rl.py"}
    for command in commands:
        (script,) = scripts & {*command} or {""}
        arguments = command[command.index(script) + 1 :] if script else []
        if script == "tools/checkpoint/convert.py":
            assert command_line._parser(script, "").parse_args(arguments).hf
        elif script:
            assert rank_main._parser().parse_intermixed_args(arguments).config
        else:
            assert command[0] == "megarl"


ACTIVATION, ASSETS = ". .venv", "python -m examples.quickstart --out runs/quickstart/assets"


def pages_of_newcomers() -> list[str]:
    """The guides of the home page, and the pages next to docs/."""
    rows = re.findall(r"^\| \d+ \| .*$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    guides = [f"docs/{name}" for row in rows[1:] for name in re.findall(r"\| \[[^]]*\]\((\w+\.md)\)", row)]
    assert len(rows) == 10 and len(guides) == 9, "the first one is the home page itself"
    return ["README.md", "CONTRIBUTING.md", "examples/tutorials/README.md", *guides]


def unprepared(text: str) -> list[str]:
    """Commands that fail for whoever pastes the shell blocks of a page in their order: nothing above them there has
    activated the environment, or made what the quickstart's config reads."""
    blocks = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.M) if not kind]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for number, line in enumerate(lines):
        needed = [ACTIVATION] if re.match(r"(?:torchrun|megarl|python) ", line) else []
        needed += [ASSETS] if needed and "quickstart_cpu.yaml" in line else []
        if not all(any(each.startswith(one) for each in lines[:number]) for one in needed):
            found.append(line)
    return found


@pytest.mark.parametrize("page", pages_of_newcomers())
def test_a_newcomers_commands_work_as_pasted(page: str) -> None:
    assert unprepared((ROOT / page).read_text()) == []


def test_every_key_is_in_the_reference() -> None:
    from megarl.config.loading.load import walk_keys

    page = keys_page()
    assert all(f"`{key.rsplit('.', 1)[-1]}`" in page or f"## `{key}`" in page for key in walk_keys())


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
