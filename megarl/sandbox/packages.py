"""The packages that sandboxed programs can import besides the standard library.

A package has its pip name, and comes from this process's environment together with its dependencies; or it is the path
of a directory, such as a `site-packages`, which is visible as a whole.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePosixPath

FOLDER = "/sandbox/packages"  # where named packages are inside the sandbox


@dataclass(frozen=True)
class Packages:
    """Read-only mounts of packages, as (path outside, path inside), and `search`, the import path inside."""

    mounts: tuple[tuple[str, str], ...] = ()
    search: tuple[str, ...] = ()


NO_PACKAGES = Packages()


def find_packages(chosen: Sequence[str]) -> Packages:
    """Return the mounts of the chosen packages. An entry with a slash is a directory, another one a package's name.

    Raises ValueError for a directory that is missing or not absolute, and for a package that is not installed or does
    not list its files.
    """
    directories = [each for each in chosen if "/" in each]
    for path in directories:
        if not os.path.isabs(path) or ":" in path or not os.path.isdir(path):
            raise ValueError(f"{path!r} is not the absolute path of a directory, as a sandbox's packages must be")
    names = [each for each in chosen if "/" not in each]
    mounts = dict.fromkeys((path, path) for path in directories)
    for each in _with_needed(names) if names else []:
        mounts.update(dict.fromkeys(_mounts(each)))
    return Packages(tuple(mounts), (*dict.fromkeys(directories), *((FOLDER,) if names else ())))


def _with_needed(names: Iterable[str]) -> list[metadata.Distribution]:
    """Return the packages of these names and all their dependencies, each once."""
    from packaging.requirements import Requirement  # only needed with packages

    found: dict[str, metadata.Distribution] = {}
    waiting = [(name, "") for name in names]
    while waiting:
        name, needed_by = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        found[key] = _installed(name, needed_by)
        needed = [Requirement(each) for each in found[key].requires or ()]
        waiting += [(each.name, name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return list(found.values())


def _installed(name: str, needed_by: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        needed = f", which {needed_by} needs," if needed_by else ""
        raise ValueError(
            f"the package {name!r} of a sandbox{needed} is not installed next to megarl: install it there, or give the "
            "absolute path of a directory that has it"
        ) from error


def _mounts(found: metadata.Distribution) -> list[tuple[str, str]]:
    """Return the mounts of one package: only its modules and folders."""
    files = [PurePosixPath(str(each)) for each in found.files or ()]
    files = [each for each in files if not each.is_absolute() and ".." not in each.parts and each.suffix != ".pth"]
    code = [each for each in files if not each.parts[0].endswith((".dist-info", ".egg-info"))]
    if not code:
        raise ValueError(
            f"the package {found.name!r} of a sandbox does not list its files, perhaps because it is installed in "
            "editable mode: give the absolute path of the directory that has it"
        )
    tops = _own(files, set(files), 1)
    outside = {str(top): str(found.locate_file(str(top))) for top in sorted(tops)}
    return [(path, f"{FOLDER}/{top}") for top, path in outside.items() if os.path.exists(path)]


def _own(files: Sequence[PurePosixPath], all_files: set[PurePosixPath], depth: int) -> set[PurePosixPath]:
    """Return the paths with exactly these files: a folder if it is a package, else its content.

    A folder without `__init__.py` may also have modules of other packages.
    """
    found: set[PurePosixPath] = set()
    below: dict[PurePosixPath, list[PurePosixPath]] = {}
    for each in files:
        if len(each.parts) == depth:
            found.add(each)
        else:
            below.setdefault(PurePosixPath(*each.parts[:depth]), []).append(each)
    for folder, inside in below.items():
        if folder / "__init__.py" in all_files or folder.name.endswith((".dist-info", ".egg-info")):
            found.add(folder)
        elif folder.name != "__pycache__":
            found |= _own(inside, all_files, depth + 1)
    return found
