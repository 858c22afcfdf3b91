"""Exceptions that several packages raise or catch: of configs, conversions, the rollout pool and the weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO


class ConfigError(ValueError):
    """One or several problems of a configuration.

    Attributes:
        problems: one line per problem, beginning with the config key.
        source: the file that was read; empty if the config came from elsewhere.
    """

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = list(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{head}{len(self.problems)} problems{lines}")


class ConversionError(ValueError):
    """A conversion cannot continue; the message names the file and the remedy."""


class NotAuthentic(RuntimeError):  # noqa: N818
    """A value was not written by a process of this run, or not for this place. It was not used."""


class MalformedMessage(RuntimeError):  # noqa: N818
    """A message between ranks is not a value of the declared type."""


class InstallationError(ValueError):
    """A package is partly installed; the message names the missing step."""


class RolloutError(RuntimeError):
    """The rollout pool cannot continue; the message names the part that failed and the reason."""


class BatchNotReady(RolloutError):  # noqa: N818
    """The groups of a step were not ready in time; they may be later."""


class RequestFailed(RolloutError):  # noqa: N818
    """An engine refused a request; the engine is sound."""


class TrajectoryFull(RequestFailed):
    """A trajectory has no room for another turn of the model, or has reached its number of turns."""


class ToolFailed(RolloutError):  # noqa: N818
    """A tool itself failed, not because of what the model wrote."""


class PoolEnded(RolloutError):  # noqa: N818
    """The supervisor has ended, and Ray with all actors ends with it."""


class PartsLost(RolloutError):  # noqa: N818
    """The rollout controller and the queue have ended. The supervisor starts new ones for the live engines."""


class ReplicaFailed(RolloutError):  # noqa: N818
    """One replica died or refused to work; `replica` is its index."""

    def __init__(self, replica: int, message: str) -> None:
        super().__init__(message)
        self.replica = replica

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.replica, str(self))


class EngineMayRun(ReplicaFailed):
    """A replica failed, and its engine may still run and hold memory."""


class NoPlace(ReplicaFailed):
    """No node has room for the engine of a replica."""


class NoReplicaLeft(ReplicaFailed):
    """The last working replica has failed."""


class NoWorkerLeft(RolloutError):  # noqa: N818
    """The last agent worker was lost, and no other could be started."""


class LostWithWorkers(RolloutError):  # noqa: N818
    """Several agent workers were lost with the same loops, which may have caused it."""


class SupervisorFailed(RolloutError):  # noqa: N818
    """The supervisor did not start, or has ended."""


class WeightSyncError(RuntimeError):
    """A weight sync did not complete; no replica serves its version.

    Attributes:
        version: the version that was to be published.
        failed_members: members of the sync group or replicas that failed themselves. Members that only lost the
            connection to a failed one are not included.
        needs_restart: replicas that failed themselves, or had begun to load and did not finish. Their weights are
            undefined, so they have to be replaced.
    """

    def __init__(
        self,
        message: str,
        *,
        version: int = -1,
        failed_members: Sequence[str] = (),
        needs_restart: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.version = version
        self.failed_members = tuple(failed_members)
        self.needs_restart = tuple(needs_restart)


class SyncAborted(WeightSyncError):  # noqa: N818
    """Another member of the sync failed; raised in the members that were waiting for it."""


class PeerTimeout(WeightSyncError):  # noqa: N818
    """A wait reached its deadline; the message names the waiting member and the one it waited for."""


class ConnectionLost(WeightSyncError):  # noqa: N818
    """A peer closed its connection during a broadcast; the leader reports the member that failed first."""


class DigestMismatch(WeightSyncError):  # noqa: N818
    """A received bucket differs from the sent one; it was not loaded."""


def clear_text(error: BaseException) -> str:
    """The message of an error for the user: megarl's own and plain ones unchanged, others with their type in front."""
    clear = isinstance(error, RolloutError | TimeoutError | ValueError)
    return str(error) if clear and str(error) else f"{type(error).__name__}: {error}"


def first_exception(group: BaseException) -> BaseException:
    """Return the first exception inside nested exception groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


# The findings of the checks before anything starts.


FIRST_PROMPT = "first prompt"  # begins its name in `Findings.seen`


@dataclass
class Findings:
    """The findings of one or several checks.

    `problems` refuse the start, as `key: what is wrong; how to fix it`. `warnings` are shown at a start and in a dry
    run. `notes`, shown in a dry run only, say what it has not checked or what the run will leave out. `seen`: (name,
    value) of what a dry run shows of data and rewards.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the findings of another check, each text once."""
        for own, new in (
            (self.problems, other.problems),
            (self.warnings, other.warnings),
            (self.notes, other.notes),
        ):
            own += [text for text in dict.fromkeys(new) if text not in own]
        self.seen += other.seen

    def print_start(self, stream: TextIO) -> None:
        """Write the output of a start: a line for each set and reward, then the warnings."""
        shown = [f"{name}: {value}" for name, value in self.seen if not name.startswith(FIRST_PROMPT)]
        stream.writelines(f"megarl: {line}\n" for line in [*shown, *(f"warning: {each}" for each in self.warnings)])

    def refuse(self) -> None:
        """Raise ConfigError that lists every problem, if there is one."""
        if self.problems:
            raise ConfigError(self.problems)
