"""Names of modules and files inside text: each must be there.

Import paths in strings (entry points, `-m` commands, programs that a test starts, targets of mocks), and paths in
documents, docstrings and comments are read by no compiler: whoever moves a module breaks them unseen.
"""

import importlib.machinery
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.support.checkout import ROOT

FOLDERS = ("benchmarks", "docs", "examples", "launch", "megarl", "tests", "tools")
FILES = (".ci/run", "Makefile", "README.md", "docker/Dockerfile", "docker/Dockerfile.dockerignore", "pyproject.toml")
SUFFIXES = ("md", "py", "sbatch", "sh", "toml", "yaml")
# They look like modules and files of this project, and are none.
EXCEPTIONS = frozenset(
    {
        "megarl.format", "megarl.step", "megarl.version",  # keys in the metadata of recorded batches
        "examples/rl/configs/NAME.yaml",  # any of them
        "my_rewards.py",  # a file that a user would write
        "training/checkpointing.py",  # of Megatron-LM
    }
)  # fmt: skip

# Not preceded or followed by what would make it a part of a longer word, path or name.
_START, _END = r"(?<![\w./*-])", r"(?![\w-])"
_DOTTED = re.compile(rf"{_START}((?:megarl|tests)(?:\.[A-Za-z_]\w*)+)(?::([A-Za-z_]\w*))?{_END}")
_IMPORTED = re.compile(r"\bfrom ((?:megarl|tests)(?:\.\w+)*) import ([\w ,]+)")
# One text (`python -m examples.quickstart`), or two words of a list (`"-m", "examples.quickstart"`).
_STARTED = re.compile(rf"-m(?:[\"'],)? [\"']?((?:megarl|tests)(?:\.\w+)*){_END}")
_PATH = re.compile(rf"{_START}((?:megarl|tests)/[\w./-]*\w)(?![\w*])")
_FILE = re.compile(rf"{_START}((?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:{'|'.join(SUFFIXES)})){_END}")
# `megarl/` and further folders may be left out where a file is named in backquotes.
_QUOTED_FILE = re.compile(r"`([\w/-]+\.(?:py|sh))`")


def files_with_references(root: Path = ROOT) -> list[Path]:
    """Every file of the checkout in which names of modules or files may stand."""
    inside = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix[1:] in SUFFIXES)
    return [*sorted(inside), *(root / name for name in FILES)]


def unknown_references(files: Iterable[Path], root: Path = ROOT) -> list[str]:
    """`file:line: name: what is wrong` for each module or file that is named in `files` and is not there."""
    return [
        f"{file.relative_to(root)}:{number}: {problem}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        for problem in problems_of(line)
    ]


def problems_of(line: str) -> list[str]:
    """`name: what is wrong` for each unknown module or file in one line of text."""
    found = dict([*_wrong_names(line), *_wrong_starts(line), *_wrong_files(line)])
    return [f"{name}: {problem}" for name, problem in found.items() if problem and name not in EXCEPTIONS]


def _wrong_names(line: str) -> Iterator[tuple[str, str | None]]:
    for match in _DOTTED.finditer(line):
        yield match[0], _problem_of_name([*match[1].split("."), *([match[2]] if match[2] else [])])
    for match in _IMPORTED.finditer(line):
        for each in match[2].split(","):
            if name := each.partition(" as ")[0].strip():
                yield f"{match[1]}.{name}", _problem_of_name([*match[1].split("."), name])


def _wrong_starts(line: str) -> Iterator[tuple[str, str | None]]:
    for match in _STARTED.finditer(line):
        if _is_package(match[1]) and _spec(f"{match[1]}.__main__") is None:
            yield f"-m {match[1]}", "a package without a module __main__"


def _wrong_files(line: str) -> Iterator[tuple[str, str | None]]:
    for match in (*_PATH.finditer(line), *_FILE.finditer(line)):
        yield match[1], None if (ROOT / match[1]).exists() else "no such file or folder"
    for match in _QUOTED_FILE.finditer(line):
        yield match[1], None if match[1] in _ends_of_paths() else "no file of the project has this name"


def _problem_of_name(names: Sequence[str]) -> str | None:
    """Say what is wrong with the names of a package, its module, and something in that; None if all of it is there."""
    known = 1
    while known < len(names) and _is_package(".".join(names[:known])) and _spec(".".join(names[: known + 1])):
        known += 1
    module, rest = ".".join(names[:known]), names[known:]
    if not rest:
        return None
    return None if rest[0] in _words(module) else f"{module} has no {rest[0]}"


@cache
def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    return importlib.util.find_spec(module)


def _is_package(module: str) -> bool:
    spec = _spec(module)
    return spec is not None and spec.submodule_search_locations is not None


@cache
def _words(module: str) -> frozenset[str]:
    """The words of a module's source, which is not imported: that may take seconds, or a GPU."""
    spec = _spec(module)
    assert spec is not None and spec.origin is not None, module
    return frozenset(re.findall(r"\w+", Path(spec.origin).read_text()))


@cache
def _ends_of_paths() -> frozenset[str]:
    """The name of every file of the checkout, its name with the folder, and so on, up to its whole path."""
    parts = (path.relative_to(ROOT).parts for path in files_with_references())
    return frozenset("/".join(each[start:]) for each in parts for start in range(len(each)))
