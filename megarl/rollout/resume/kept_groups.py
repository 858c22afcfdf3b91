"""The groups that a journal keeps over a restart, which of them a resumed run can use, and how long. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.derived.staleness import Pace
from megarl.queue.trajectory import Trajectory, VersionSpan, first_bad_logprob
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.resume.journal_records import EpochRecord, decode_group, decode_unfinished, read_head, spans_of
from megarl.rollout.resume.lineage import Lineage, common_version, recount


@dataclass
class JournaledGroup:
    """A group with tokens or tool calls, recorded in `epoch`.

    `common`: the last version that the histories share. `version`: where the run resumes. Its tokens count as their
    true version or, if a span was recorded with lost updates, possibly as an older one: the current history may contain
    some of these updates.
    """

    record: bytes
    head: Mapping[str, Any]
    epoch: EpochRecord
    common: int = 0
    version: int = 0

    @property
    def group(self) -> int:
        """Its id."""
        return int(self.head["group"])

    @property
    def finished(self) -> bool:
        """True if its trajectories are complete; else its responses continue."""
        return bool(self.head["kind"] == "group")

    def _recounted(self, spans: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        return recount(spans, self.common, self.epoch.lineage)

    @property
    def counts_as(self) -> set[int]:
        """The versions of the current history that its tokens count as.

        A loop with tool calls but no token counts as the version at which the run resumes: it must continue from its
        calls, which may not be repeated.
        """
        if not self.finished and not any(spans_of(self.head)) and self.head["loops"]:
            return {self.version}
        return {span.counts_as for row in spans_of(self.head) for span in self._recounted(row)}

    @property
    def has_bad_logprobs(self) -> bool:
        """True if an engine returned non-finite log-probs. It decodes the tokens."""
        if self.finished:
            failed = any(row["status"] == "failed" for row in self.head["rows"])
            return failed and any(row.has_bad_logprobs for row in decode_group(self.record))
        responses = decode_unfinished(self.record).responses.values()
        return any(first_bad_logprob(each.tokens.logprobs) is not None for each in responses)

    def rows(self) -> list[Trajectory]:
        """Return the trajectories of a finished group."""
        return [replace(row, versions=self._recounted(row.versions)) for row in decode_group(self.record)]

    def begun(self) -> UnfinishedGroup:
        """Return the progress of an unfinished group."""
        begun = decode_unfinished(self.record)
        responses = {
            place: replace(each, tokens=replace(each.tokens, versions=self._recounted(each.tokens.versions)))
            for place, each in begun.responses.items()
        }
        return replace(begun, responses=responses)


class KeptGroups:
    """The groups of a journal, each by its last record, and the lineage of the last epoch."""

    def __init__(self, records: Iterable[bytes]) -> None:
        """`records`: the journal's, in order. Raises ValueError or KeyError for records of another kind."""
        self.groups: dict[int, JournaledGroup] = {}
        self.lineage: Lineage = ()
        epoch: EpochRecord | None = None
        for record in records:
            head = read_head(record)
            if head["kind"] == "epoch":
                epoch = EpochRecord.of(head)
                self.lineage = epoch.lineage
            elif epoch is None:
                raise ValueError("a group was recorded before any epoch")
            else:
                self.groups[head["group"]] = JournaledGroup(record, head, epoch)

    def resume(self, resumed: Lineage, version: int) -> None:
        """Keep groups whose history shares a version with `resumed`, which ends at `version`; recount them."""
        for group, each in list(self.groups.items()):
            common = common_version(each.epoch.lineage, resumed, version)
            if common is None:
                del self.groups[group]
            else:
                each.common, each.version = common, version

    def versions(self) -> dict[int, set[int]]:
        """Return the versions that each group's tokens count as, finished groups first, then by id."""
        order = sorted(self.groups.values(), key=lambda each: (not each.finished, each.group))
        return {each.group: each.counts_as for each in order}

    def drop(self, unfit: Callable[[JournaledGroup], bool]) -> int:
        """Remove groups that cannot be used; return their number."""
        dropped = [group for group, each in self.groups.items() if unfit(each)]
        for group in dropped:
            del self.groups[group]
        return len(dropped)


class SupersededRecords:
    """Finds records of a journal that a later record of the same group supersedes.

    Pass all records in order, first to `count`, then to `later`. Some may be added in between.
    """

    def __init__(self) -> None:
        self._left: Counter[int] = Counter()

    def count(self, head: Mapping[str, Any]) -> None:
        """Count a record by its head."""
        if head["kind"] != "epoch":
            self._left[head["group"]] += 1

    def later(self, head: Mapping[str, Any]) -> bool:
        """Return whether the same group has a later record."""
        self._left[head["group"]] -= 1
        return self._left[head["group"]] > 0


_IN_PROGRESS = 2  # checkpoints: one that is requested, while at most one other is still being written


@dataclass(frozen=True)
class History:
    """The groups that a history has settled: those below `next_group` that are not `unsettled`."""

    version: int
    next_group: int
    unsettled: frozenset[int]

    @classmethod
    def of(cls, admission: Mapping[str, Any]) -> History:
        """Return the history of an admission's `state_dict`."""
        return cls(int(admission["version"]), int(admission["next_group"]), frozenset(admission["unsettled"]))

    def settled(self, group: int) -> bool:
        """Return whether the end of a group is part of this history."""
        return group < self.next_group and group not in self.unsettled


class Retention:
    """The histories from which a run could resume: of the newest complete checkpoint, and of those being saved."""

    def __init__(self, pace: Pace, resumed: History) -> None:
        """`resumed`: the history with which this trainer began."""
        # The version of a checkpoint's weights is less than `sync_interval` above the published one.
        self._reach = pace.max_staleness + pace.sync_interval - 1
        self._complete = resumed
        self._saving: dict[int, History] = {}

    def saving(self, step: int, history: History) -> None:
        """Record that a checkpoint of the first `step` steps is about to be written."""
        self._saving[step] = history
        for old in sorted(self._saving)[:-_IN_PROGRESS]:
            del self._saving[old]

    def saved(self, step: int) -> bool:
        """Record that the checkpoint of `step` is complete; return False if that was known."""
        if step not in self._saving:
            return False
        self._complete = self._saving[step]
        self._saving = {later: history for later, history in self._saving.items() if later > step}
        return True

    def keeps(self, group: int, newest: int, history: History) -> bool:
        """Return whether a finished group can still be used. `newest`: the highest version of its tokens.

        `history`: what the run has settled so far. Only a run that resumes from an earlier point reuses its groups.
        There, tokens of later versions count as older by the number of lost updates, and soon exceed the bound on
        staleness. So the journal holds little more than unsettled groups, even if no checkpoint is ever written.
        """
        if not history.settled(group):
            return True
        return any(
            not earlier.settled(group) and newest <= earlier.version + self._reach
            for earlier in (self._complete, *self._saving.values())
        )
