"""The limits and the result of a sandboxed run."""

from dataclasses import dataclass
from typing import Literal

LimitName = Literal["time", "cpu", "memory", "output", "disk"]
"""A limit that ended a run. `disk`: the number of files in the scratch directory."""


class SandboxError(RuntimeError):
    """A program could not be run: the sandbox is unavailable or closed. The message has the fix."""


class SandboxBusyError(SandboxError):
    """No place became free in time."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        timeout_s: wall time, including the start.
        cpu_s: whole CPU seconds of each process.
        memory_mib: memory of all processes and the scratch directory together; also the address space of each process.
        processes: processes and threads.
        scratch_mib: size of the scratch directory, which is in memory.
        files: open files of each process.
        entries: files and directories in the scratch directory.
        output_kib: standard output and standard error, each.
    """

    timeout_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 32
    scratch_mib: int = 64
    files: int = 64
    entries: int = 10_000
    output_kib: int = 256

    def __post_init__(self) -> None:
        """Refuse limits that are not positive; raises ValueError."""
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"the sandbox's limit {name} is {value}, and must be positive")
        if self.memory_mib < 64:
            raise ValueError(f"the sandbox's limit memory_mib is {self.memory_mib}: Python needs at least 64 MiB")


@dataclass(frozen=True)
class RunResult:
    """How a program ended.

    Attributes:
        status: its exit status; minus the signal's number if a signal ended it; None if a limit did.
        limit: the limit that ended it, if any.
        seconds: wall time.
    """

    status: int | None
    stdout: str
    stderr: str
    limit: LimitName | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether the program ended on its own, with status 0."""
        return self.status == 0 and self.limit is None
