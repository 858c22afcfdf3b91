"""The keys of the rows that each group has in the queue: a sample may have several rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.queue.trajectory import SampleTag


class QueuedRows:
    """Keeps the keys from when a group is put into the queue until its rows leave it."""

    def __init__(self) -> None:
        self._keys: dict[int, list[str]] = {}

    def note(self, rows: Sequence[SampleTag]) -> None:
        """Record a group that is put into the queue, by the tags of its rows."""
        self._keys[rows[0].group_id] = [row.key for row in rows]

    def keys(self, group: int) -> list[str]:
        """Return the keys of a group's rows, in the order of samples and parts. Raises KeyError for an unknown one."""
        return self._keys[group]

    def leave(self, groups: Iterable[int]) -> list[str]:
        """Forget groups; return the keys of the rows that leave the queue. Of a group that is not in it there are none.

        So it is with the groups of a batch that another controller has given to the trainer.
        """
        return [key for group in groups for key in self._keys.pop(group, [])]

    def clear(self) -> None:
        """Forget all groups."""
        self._keys.clear()
