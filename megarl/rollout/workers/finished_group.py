"""The end of a prompt group: what decides about it, wherever its rows are, and their way to the queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set

from megarl.common.values import first_parts
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.queue.transfer import QueueWriter
from megarl.rollout.resume.journal import RolloutJournal
from megarl.rollout.tasks.prompts import PromptSource


class GroupEnd(ABC):
    """A group whose samples have all ended. Either `put` or `drop` follows."""

    @property
    @abstractmethod
    def tags(self) -> Sequence[SampleTag]:
        """The summaries of the rows, in the order of samples and parts."""

    @property
    @abstractmethod
    def rewards(self) -> Sequence[float]:
        """The rewards of the samples that can be used."""

    @property
    @abstractmethod
    def failures(self) -> Sequence[str]:
        """The reasons why the other samples cannot be used."""

    @property
    @abstractmethod
    def versions(self) -> Set[int]:
        """The versions that the tokens of all samples count as."""

    @abstractmethod
    def note(self, journal: RolloutJournal, source: PromptSource) -> None:
        """Give the rows to the journal. `source`: that of the group's problem."""

    @abstractmethod
    async def put(self, *, more: bool) -> None:
        """Write the rows to the queue. `more`: see `QueueWriter.put_group`. Raises what that raises."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the rows, which nobody needs."""

    @property
    def demonstrated(self) -> bool:
        """True if its samples are demonstrations, which have no rewards."""
        return any(tag.demonstrated for tag in self.tags)

    @property
    def usable(self) -> bool:
        """True if the group can be trained on."""
        return usable_samples(["ok"] * len(self.rewards))


class LocalRows(GroupEnd):
    """The end of a group whose rows are in this process."""

    def __init__(self, rows: Sequence[Trajectory], writer: QueueWriter) -> None:
        self.rows, self._writer = rows, writer

    @property
    def tags(self) -> Sequence[SampleTag]:
        """See `GroupEnd.tags`."""
        return [row.tag for row in self.rows]

    @property
    def rewards(self) -> Sequence[float]:
        """See `GroupEnd.rewards`."""
        return [row.reward for row in first_parts(self.rows) if row.status == "ok"]

    @property
    def failures(self) -> Sequence[str]:
        """See `GroupEnd.failures`."""
        return [row.failure for row in first_parts(self.rows) if row.status != "ok"]

    @property
    def versions(self) -> Set[int]:
        """See `GroupEnd.versions`."""
        return {span.counts_as for row in self.rows for span in row.versions}

    def note(self, journal: RolloutJournal, source: PromptSource) -> None:
        """See `GroupEnd.note`."""
        journal.note(self.rows, source)

    async def put(self, *, more: bool) -> None:
        """See `GroupEnd.put`."""
        await self._writer.put_group(self.rows, more=more)

    def drop(self) -> None:
        """See `GroupEnd.drop`."""


def usable_samples(statuses: Iterable[str]) -> bool:
    """Tell whether a group can be trained on: at least two samples are ok, as an advantage compares samples."""
    return sum(status == "ok" for status in statuses) >= 2
