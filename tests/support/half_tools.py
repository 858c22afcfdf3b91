"""Classes that are no tools."""

from __future__ import annotations


class NoSchema:
    name = "half"
    description = "Half a tool."

    async def close(self) -> None: ...


class FailsToStart:
    def __init__(self) -> None:
        raise KeyError("server")
