"""Every command on a page is one that its program takes, and every key that a page shows exists."""

import argparse
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile, groupby
from pathlib import Path

import pytest

from megarl.checkpoint.convert import cli as convert
from megarl.cli import main
from megarl.config.loading.load import load_config, walk_keys
from megarl.run.start import main as rank_main
from tests.support.checkout import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/tutorials/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Programs of others, which are taken as they are.
FOREIGN = {"apt-get", "cd", "curl", "docker", "echo", "export", "hf", "pip", "scancel", "ss", "tensorboard", "ulimit"}
SCRIPT_FOLDERS = ("examples/", "launch/", "tools/")


def commands_of(text: str) -> list[str]:
    """Return the command lines of a page: all lines of its blocks without a language, but comments."""
    blocks = [block for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.M) if not kind]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def programs_of(command: str) -> Iterator[list[str]]:
    """Yield each program of a line with its arguments, without `...` and the variables before a program."""
    words = [word for word in shlex.split(command, comments=True) if word != "..."]
    for joined, part in groupby(words, {"&&", "|", ";"}.__contains__):
        if not joined:
            yield list(dropwhile(re.compile(r"[A-Z_]+=").match, part))


def check(words: Sequence[str]) -> None:
    """Have the program's own parser take the arguments. Raises SystemExit or AssertionError if it does not."""
    program, arguments = words[0], list(words[1:])
    name = Path(program).name
    if name in CHECKS:
        CHECKS[name](arguments)
    elif program.startswith(SCRIPT_FOLDERS):
        assert (ROOT / program).is_file(), program
    else:
        assert program == "." or name in FOREIGN, f"{program}: unknown program"


def check_megarl(arguments: list[str]) -> None:
    if arguments[0] == "convert":
        convert._parser("megarl convert", "").parse_args(arguments[1:])
    else:
        check_config(main._parse(arguments))


def check_config(options: argparse.Namespace) -> None:
    """Check the overrides of a config that is there."""
    path = getattr(options, "config", None)
    if path is not None and (ROOT / path).is_file():
        load_config(ROOT / path, options.overrides)


def check_torchrun(arguments: list[str]) -> None:
    """The rank's own part; the options of torchrun come before it."""
    if "-m" in arguments:
        place = arguments.index("-m")
        check(arguments[place + 1 :])
        return
    places = [number for number, word in enumerate(arguments) if word.endswith(".py")]
    check(arguments[places[0] :])


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, arguments[1]
    else:
        check(arguments)


def check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in arguments if "=" not in word} <= targets, arguments


def check_sbatch(arguments: list[str]) -> None:
    (script,) = [word for word in arguments if word.endswith(".sbatch")]
    assert (ROOT / script).is_file(), script


def check_smoke(arguments: list[str]) -> None:
    """Tests outside tests/benchmarks import no benchmark."""
    source = (ROOT / "benchmarks/gpu_smoke.py").read_text()
    assert all(f'"{word}"' in source for word in arguments if word.startswith("--")), arguments


def check_file(arguments: list[str]) -> None:
    """A program of another environment, which this one cannot ask for its arguments."""


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "megarl": check_megarl,
    "torchrun": check_torchrun,
    "train_rl.py": lambda arguments: check_config(rank_main._parser().parse_intermixed_args(arguments)),
    "convert.py": lambda arguments: check_megarl(["convert", *arguments]),
    "gpu_smoke.py": check_smoke,
    "python": check_python,
    "make": check_make,
    "sbatch": check_sbatch,
    "export_tasks.py": check_file,
    "pre-commit": check_file,
}


def shown() -> Iterator[object]:
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for number, command in enumerate(commands_of(page.read_text())):
            yield pytest.param(command, id=f"{name}-{number}")


@pytest.mark.parametrize("command", shown())
def test_a_command_of_a_page_is_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in programs_of(command):
        check(words)


def test_commands_inside_a_text_exist() -> None:
    known = set(main.build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    found = [(page.name, name) for page in PAGES for name in re.findall(r"`megarl ([a-z]+)", page.read_text())]
    assert len(found) > 50 and [each for each in found if each[1] not in known] == []


def test_the_keys_of_the_guide_exist() -> None:
    tables = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE)
    shown_keys, last = [], ""
    for name in (name for cell in tables for name in re.findall(r"`([a-z_.]+)`", cell)):
        last = last.rpartition(".")[0] + name if name.startswith(".") else name
        shown_keys.append(last)
    known = {*walk_keys(), "tools"}
    assert len(shown_keys) >= 35 and [key for key in shown_keys if key not in known] == []
