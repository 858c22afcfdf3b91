"""The layers of the package are a contract that a machine checks, and that a forbidden import breaks."""

from __future__ import annotations

import ast
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
    ("module", "line", "told"),
    [
        ("models/rope.py", "import megarl.config.schema", "megarl.models is not allowed to import megarl.config"),
        (
            "rollout/routing.py",
            "def late() -> None:\n    from megarl.trainer.policy import Policy",
            "megarl.rollout is not allowed to import megarl.trainer",
        ),
        (
            "common/files.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megarl.run.loop import train",
            "megarl.common is not allowed to import megarl.run",
        ),
        (
            "checkpoint/save/history.py",
            "import megarl.checkpoint.convert.units",
            "megarl.checkpoint.save is not allowed to import megarl.checkpoint.convert",
        ),
        ("new_package.py", "", "new_package"),
        ("checkpoint/new_part.py", "", "new_part"),
        ("models/info.py", "import megarl.models.read_config", "no circles inside a package BROKEN"),
    ],
)
def test_a_forbidden_import_is_found(tree: Path, module: str, line: str, told: str) -> None:
    path = tree / "megarl" / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    ended = lint_imports(tree)
    assert ended.returncode != 0
    assert told in ended.stdout.replace("`", ""), ended.stdout


@pytest.mark.parametrize("package", ["megarl", "megarl/checkpoint"])
def test_packages_that_are_in_no_layer_import_nothing(package: str) -> None:
    """The contract cannot see them: one is the container itself, the other is listed by its parts."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))
