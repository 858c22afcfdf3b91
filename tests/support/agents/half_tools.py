"""Classes that are no tools."""


class NoSchema:
    name = "half"
    description = "Half a tool."

    async def close(self) -> None: ...


class FailsToStart:
    def __init__(self) -> None:
        raise KeyError("server")


class WrongSchema:
    name, description, parameters, idempotent = "half", "Half a tool.", ["text"], True

    async def call(self, arguments: object, *, timeout_s: float) -> None: ...

    async def close(self) -> None: ...
