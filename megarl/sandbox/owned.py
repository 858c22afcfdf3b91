"""Descriptors that belong to a block of code, each closed once: where its use ends, or at the end of the block."""

from __future__ import annotations

import os
from types import TracebackType


class OwnedDescriptors:
    """A context manager; one thread uses it."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __enter__(self) -> OwnedDescriptors:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is still open."""
        self.close(*self._open)

    def add(self, descriptor: int) -> int:
        """Take over a descriptor, and return it."""
        self._open.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """Return the reading and the writing end of a pipe."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        return self.add(reading), self.add(writing)

    def in_memory(self, name: str, content: bytes) -> int:
        """Return a descriptor of a file without a path that holds `content`, at its beginning."""
        descriptor = self.add(os.memfd_create(name, os.MFD_CLOEXEC))
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def close(self, *descriptors: int) -> None:
        """Close those of the descriptors that are still open here."""
        for descriptor in set(descriptors) & self._open:
            self._open.discard(descriptor)
            os.close(descriptor)
