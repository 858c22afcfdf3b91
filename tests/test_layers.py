"""The layers of the package are a contract that a machine checks, and that a forbidden import breaks."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the tree below `root`, by its own pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    environment = {"PYTHONPATH": str(root), "PATH": str(Path(sys.executable).parent)}
    return subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, timeout=300, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "megarl", tmp_path / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_package_keeps_its_layers() -> None:
    ended = lint_imports(ROOT)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("module", "line", "reported"),
    [
        (
            "models/architecture/rope.py",
            "import megarl.config.schema",
            "megarl.models is not allowed to import megarl.config",
        ),
        (
            "rollout/fleet/router.py",
            "def late() -> None:\n    from megarl.trainer.policy import Policy",
            "megarl.rollout is not allowed to import megarl.trainer",
        ),
        (
            "common/files.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megarl.run.loop.loop import train",
            "megarl.common is not allowed to import megarl.run",
        ),
        (
            "checkpoint/save/history.py",
            "import megarl.checkpoint.convert.workers",
            "megarl.checkpoint.save is not allowed to import megarl.checkpoint.convert",
        ),
        ("new_package.py", "", "new_package"),
        ("checkpoint/new_part.py", "", "new_part"),
        (
            "models/architecture/architecture.py",
            "import megarl.models.hf.read_config",
            "no circles inside a package BROKEN",
        ),
    ],
)
def test_a_forbidden_import_is_found(tree: Path, module: str, line: str, reported: str) -> None:
    path = tree / "megarl" / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    ended = lint_imports(tree)
    assert ended.returncode != 0
    assert reported in ended.stdout.replace("`", ""), ended.stdout


def imports_of(path: Path) -> tuple[list[str], list[str]]:
    """The modules that a file imports when it is loaded, and those that it names for type checkers only."""
    tree = ast.parse(path.read_text())
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    unseen = {id(each) for node in checked for each in ast.walk(node)}
    loaded: list[str] = []
    for_types: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            (for_types if id(node) in unseen else loaded).extend(names)
    return loaded, for_types


def test_packages_that_are_in_no_layer_import_nothing() -> None:
    """The contract cannot see them: one is the container itself, the other is listed by its parts.

    `megarl` finds the names of the public API when they are first used.
    """
    assert imports_of(ROOT / "megarl" / "checkpoint" / "__init__.py") == ([], [])
    loaded, _ = imports_of(ROOT / "megarl" / "__init__.py")
    assert sorted(loaded) == ["__future__", "importlib", "megarl.common.moved", "typing"]


def test_no_module_of_the_package_uses_the_public_api() -> None:
    """It is above all layers: a module that imported a name from it would reach every layer unseen."""
    parts = {path.stem for path in (ROOT / "megarl").iterdir()}
    found = []
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module == "megarl":
                names = [alias.name for alias in node.names if alias.name not in parts]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name == "megarl"]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert found == []


def test_benchmarks_need_no_tests_and_tests_only_what_benchmarks_share() -> None:
    found = []
    for folder, forbidden in (("benchmarks", r"tests\b"), ("tests", r"benchmarks\b(?!\.lib\b)")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            loaded, for_types = imports_of(path)
            names = [name for name in (*loaded, *for_types) if re.match(forbidden, name)]
            found += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert found == []
