"""Files that are replaced atomically: a reader sees either the old content or the new one."""

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

# Keeps reads of a model's or a checkpoint's files inside its directory.
#
# Names in an index, and symbolic links, come with the files and may be a stranger's. A link may lead anywhere inside
# the directory. The files of the Hugging Face cache are links, `models--ORG--NAME/snapshots/REVISION/FILE` to
# `models--ORG--NAME/blobs/HASH`: in such a snapshot a link may lead anywhere inside `models--ORG--NAME`, which is what
# was downloaded as one model.


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


def write_json(path: Path, content: object) -> None:
    """Write `content` as JSON to a temporary file and rename it to `path`; NaN and infinities become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(finite(content), indent=2, allow_nan=False).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a whole file atomically. Raises OSError, and leaves nothing else behind."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # processes of two hosts may share an id
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_private(path: Path, content: str) -> None:
    """Replace a file, at once as a whole, by one of mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
    temporary.replace(path)


def last_bytes(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, `most` at most; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most)
    except OSError:
        return b""


def finite(content: object) -> object:
    """Return JSON content with every NaN and infinity replaced by None, because JSON has no such numbers."""
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
