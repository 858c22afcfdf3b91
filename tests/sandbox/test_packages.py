"""Packages in the sandbox: those that are named can be imported, are read-only, and nothing alongside them is seen."""

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from megarl.sandbox.limits import Limits, RunResult
from megarl.sandbox.packages import FOLDER, NO_PACKAGES, Packages, find_packages
from megarl.sandbox.runner import Sandbox

pytestmark = pytest.mark.sandbox

LONG_S = 120.0


def run(program: str, *packages: str) -> RunResult:
    with contextlib.closing(
        Sandbox(Limits(timeout_s=LONG_S, cpu_s=60, memory_mib=1024), slots=1, packages=packages)
    ) as sandbox:
        return sandbox.run_now(program)


def test_numpy_and_sympy_compute() -> None:
    program = "import numpy, sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 2), numpy.linalg.det(numpy.eye(3)))"
    assert run(program, "numpy", "sympy").stdout == "[-sqrt(2), sqrt(2)] 1.0\n"
    assert "No module named 'numpy'" in run(program).stderr


def test_only_what_was_named_and_what_it_needs_is_seen_and_nothing_can_be_written() -> None:
    """sympy needs mpmath. The directory in which they are installed holds many others, pydantic among them."""
    outside = Path(find_packages(["sympy"]).mounts[0][0]).parent
    assert (outside / "pydantic").is_dir()
    program = f"""
import os
print(sorted(name for name in os.listdir({FOLDER!r}) if not name.endswith(".dist-info")))
print(os.path.exists({str(outside)!r}))
for path in ({FOLDER!r} + "/new.py", {FOLDER!r} + "/mpmath/new.py", {FOLDER!r} + "/mpmath/__init__.py"):
    try:
        open(path, "a")
        print("written")
    except OSError as error:
        print(error.strerror)
try:
    import pydantic
except ImportError as error:
    print(error)
"""
    seen, elsewhere, *refused, missing = run(program, "sympy").stdout.splitlines()
    assert seen == "['isympy.py', 'mpmath', 'sympy']"
    assert elsewhere == "False"  # the place outside has no name inside
    assert refused[:2] == ["Read-only file system"] * 2 and refused[2] in (refused[0], "Permission denied")
    assert missing == "No module named 'pydantic'"


@pytest.mark.parametrize("names", [["no_such_package"], ["numpy", "no-such-package"]])
def test_a_package_that_is_not_installed_is_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no.such.package' of a sandbox is not installed next to megarl: install it"):
        find_packages(names)


def test_directories_keep_their_place() -> None:
    assert find_packages([]) == NO_PACKAGES
    assert find_packages(["/usr/lib"]) == Packages((("/usr/lib", "/usr/lib"),), ("/usr/lib",))


class Listed(metadata.Distribution):
    """A package with these files below `root`."""

    def __init__(self, root: Path, *files: str, requires: str = "") -> None:
        self.root, self.listed = root, files
        self.text = f"Name: listed\n{requires}"
        for each in files:
            path = root / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def read_text(self, filename: str) -> str | None:
        if filename == "RECORD":
            return "".join(f"{each},,\n" for each in self.listed)
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:  # type: ignore[override]
        return self.root / str(path)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Listed]]:
    found: dict[str, Listed] = {}

    def look(name: str) -> Listed:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "distribution", look)
    yield found


def inside(names: list[str], root: Path) -> list[str]:
    """The paths that are shown, below the folder for packages; each has the name that it has outside."""
    mounts = find_packages(names).mounts
    for source, target in mounts:
        assert PurePosixPath(source).relative_to(root) == PurePosixPath(target).relative_to(FOLDER)
    return [str(PurePosixPath(target).relative_to(FOLDER)) for _, target in mounts]


def test_a_folder_that_packages_share_is_not_shown_as_a_whole(installed: dict[str, Listed], tmp_path: Path) -> None:
    """A folder without `__init__.py` may hold other packages; what is outside, or runs at every start, is left out."""
    (tmp_path / "shared/other").mkdir(parents=True)
    installed["part"] = Listed(
        tmp_path, "shared/part/__init__.py", "shared/part/deep/x.py", "single.py", "__pycache__/single.cpython.pyc",
        "hook.pth", "part-1.dist-info/RECORD", "part-1.dist-info/deep/LICENSE",
    )  # fmt: skip
    installed["part"].listed += ("../../bin/part", "/etc/passwd")
    assert inside(["part"], tmp_path) == ["part-1.dist-info", "shared/part", "single.py"]


def test_what_a_package_needs_is_shown_once_and_only_if_it_applies(
    installed: dict[str, Listed], tmp_path: Path
) -> None:
    needs = "Requires-Dist: second\nRequires-Dist: absent; python_version < '3'\nRequires-Dist: more; extra == 'all'\n"
    installed["first"] = Listed(tmp_path, "first/__init__.py", requires=needs)
    installed["second"] = Listed(tmp_path, "second/__init__.py", requires="Requires-Dist: first\n")
    assert sorted(inside(["first", "second"], tmp_path)) == ["first", "second"]
    installed["second"].text += "Requires-Dist: lost>=2\n"
    with pytest.raises(ValueError, match="'lost' of a sandbox, which second needs, is not installed"):
        find_packages(["first"])


def test_a_package_whose_files_are_not_known_is_refused(installed: dict[str, Listed], tmp_path: Path) -> None:
    installed["edited"] = Listed(tmp_path, "__editable__.edited.pth", "edited-1.dist-info/RECORD")
    with pytest.raises(ValueError, match="'listed' of a sandbox does not list its files"):
        find_packages(["edited"])
