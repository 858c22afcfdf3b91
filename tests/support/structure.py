"""Rules for the tree of tests (which module lies where, and what it may import), for names and for docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

# Folders that belong to no folder of megarl/.
OWN_FOLDERS = frozenset({"benchmarks", "jobs", "security", "support", "system"})
# A docstring that begins with one of these is a clause without a sentence around it ("Whether x is y.").
CLAUSE_WORDS = frozenset({
    "also", "as", "but", "by", "how", "not", "of", "that", "until",
    "what", "when", "where", "whether", "which", "who", "whose", "why",
})  # fmt: skip
_TARGET = re.compile(r"\w+(?:\.\w+)+:\w+")
_SLOW_PART = re.compile(r"^(test-slow-[\w-]+):.*\n\t\$\(PY\) -m pytest -m slow (.+)$", re.MULTILINE)
_CAMEL_CASE = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")


def forbidden_imports(root: Path) -> list[str]:
    """Places where test modules or conftests are imported, or named by a string for another process to import them."""
    return [
        f"{path.relative_to(root)}:{line}: imports {name}"
        for path in sorted(root.rglob("*.py"))
        for line, name in _imported(path, root)
        if any(_is_test(part) for part in name.split("."))
    ]


def _is_test(name: str) -> bool:
    return name.startswith("test_") or name == "conftest"


def _imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything of the tests that a module imports, or names as `module:function`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(root.parent).parts[: -node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _TARGET.fullmatch(node.value):
            names = [node.value.partition(":")[0]]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == root.name)


def folders_without_counterpart(root: Path, package: Path) -> list[str]:
    """Folders with tests, and no folder of the package has their path."""
    folders = {path.parent.relative_to(root) for path in root.rglob("*.py")} - {Path()}
    own = {folder for folder in folders if folder.parts[0] in OWN_FOLDERS}
    return sorted(str(folder) for folder in folders - own if not (package / folder / "__init__.py").is_file())


def folders_that_are_no_package(root: Path) -> list[str]:
    """Folders without `__init__.py`: their modules have no import path."""
    folders = {path.parent for path in root.rglob("*.py")}
    return sorted(str(folder.relative_to(root)) for folder in folders if not (folder / "__init__.py").is_file())


def repeated_names(root: Path) -> list[str]:
    """File names of more than one module of support."""
    names = Counter(path.name for path in (root / "support").rglob("*.py") if path.name != "__init__.py")
    return sorted(name for name, count in names.items() if count > 1)


def slow_tests_outside_parts(root: Path, makefile: str) -> list[str]:
    """Modules with slow tests that not exactly one test-slow-* part of `make test-all` runs.

    Those that also have the mark `cluster` belong to `make test-cluster`.
    """
    (prerequisites,) = re.findall(r"^test-all:(.*)##", makefile, re.MULTILINE)
    parts = {name: folders.split() for name, folders in _SLOW_PART.findall(makefile) if name in prerequisites.split()}
    found = []
    for path in sorted(root.rglob("test_*.py")):
        inside = path.relative_to(root.parent)
        marks = _marks(path)
        if "slow" in marks and "cluster" not in marks:
            runs_it = [name for name, folders in parts.items() if any(inside.is_relative_to(each) for each in folders)]
            if len(runs_it) != 1:
                found.append(f"{inside}: run by {', '.join(runs_it) or 'no part'}")
    return found


def _marks(path: Path) -> set[str]:
    """Names of pytest's marks that a module mentions: in decorators, in `pytestmark`, or in `marks=`."""
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if ast.unparse(node.value) in {"pytest.mark", "mark"}}


def helpers_elsewhere(root: Path) -> list[str]:
    """Modules outside support that are neither test modules nor conftests; functions of conftests, except fixtures."""
    found = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] == "support" or path.name == "__init__.py":
            continue
        if not _is_test(path.stem):
            found.append(str(inside))
        elif path.name == "conftest.py":
            functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            found += [f"{inside}:{each.lineno}: {each.name}" for each in functions if not _is_fixture(each)]
    return found


def _is_fixture(function: ast.FunctionDef) -> bool:
    """Hooks of pytest have their place in conftests too."""
    decorated = any("fixture" in ast.unparse(each) for each in function.decorator_list)
    return decorated or function.name.startswith("pytest_")


def repeated_class_names(package: Path, programs: Path) -> list[str]:
    """Public classes and type aliases of one name in several modules of the package, or of the programs beside it."""
    places: dict[str, list[str]] = {}
    for folder in (package, programs):
        for path in sorted(folder.rglob("*.py")):
            for name in _public_types(path):
                places.setdefault(name, []).append(str(path.relative_to(package.parent)))
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]


def _public_types(path: Path) -> Iterator[str]:
    """Names of a module's own classes, and names in CamelCase that it assigns: type aliases and type variables."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            yield from (name for name in names if _CAMEL_CASE.fullmatch(name))


def repeated_module_names(package: Path) -> list[str]:
    """Modules of one name in several folders of the package."""
    counts = Counter(path.name for path in package.rglob("*.py"))
    return sorted(name for name, count in counts.items() if count > 1 and name not in {"__init__.py", "__main__.py"})


def loose_modules(package: Path) -> list[str]:
    """Modules of the package that belong to no layer."""
    return sorted(path.name for path in package.glob("*.py") if path.name not in {"__init__.py", "__main__.py"})


def bare_clauses(folders: Iterable[Path]) -> list[str]:
    """Docstrings that begin as a question or an aside does: they are no sentences, and no plain noun phrases."""
    found = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text.partition(" ")[0].strip(",.:;").lower() in CLAUSE_WORDS:
                    found.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found
