"""Keeps reads of a model's or a checkpoint's files inside its directory.

Names in an index, and symbolic links, come with the files and may be a stranger's. A link may lead anywhere inside the
directory. The files of the Hugging Face cache are links, `models--ORG--NAME/snapshots/REVISION/FILE` to
`models--ORG--NAME/blobs/HASH`: in such a snapshot a link may lead anywhere inside `models--ORG--NAME`, which is what
was downloaded as one model.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def inside(directory: Path, name: str) -> Path:
    """Return the path of the file `name` of `directory`; it need not exist.

    Raises ValueError if the name, or a link on the way, leads out of the directory.
    """
    parts = PurePosixPath(name)
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\0" in name:
        raise ValueError(f"{directory}: {name!r} is not the name of a file inside this directory")
    path = directory / name
    root, target = _root(directory), path.resolve()
    if not target.is_relative_to(root):
        raise ValueError(
            f"{path} is a link to {target}, outside {root}; only files inside are read: put the file itself there"
        )
    return path


def refuse_outside_links(directory: Path) -> None:
    """Raise ValueError if `directory` itself has an entry that is a link out of it."""
    with os.scandir(directory) as entries:
        links = sorted(entry.name for entry in entries if entry.is_symlink())
    for name in links:
        inside(directory, name)


def _root(directory: Path) -> Path:
    """Return the real path of the directory, or of the cached model if this is a snapshot, or a part of one."""
    resolved = directory.resolve()
    for path in (resolved, *resolved.parents):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent
    return resolved
