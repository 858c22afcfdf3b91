"""Everything that a directory holds, to compare it before and after."""

from pathlib import Path


def tree_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, time of modification and content of every file and directory below `directory`, itself included."""
    found = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_mtime_ns, content)
    return found
