"""A run that is killed uses again what it had generated: within the bound, and each group once in the history."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set

import pytest
from hypothesis import settings

from megarl.config.derived.staleness import Pace
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.admission.admission import Admission
from megarl.rollout.resume import kept_groups
from megarl.rollout.resume.kept_groups import Retention
from tests.support.machines.resume_machine import ResumeMachine, run_with_crashes

ResumeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestResume = ResumeMachine.TestCase


def last_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version number means the same weights in every attempt."""
    monkeypatch.setattr(kept_groups, "recount", lambda spans, common, lineage: tuple(spans))


def counts_as_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of lost updates count as of the version at which the run resumes."""
    monkeypatch.setattr(VersionSpan, "counts_as", property(lambda span: span.version - span.lost))


def every_history_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lineage is not looked at, only the version of the checkpoint."""
    monkeypatch.setattr(kept_groups, "common_version", lambda other, resumed, version: version)


def keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are kept without regard to what the steps within their bound can take."""
    before = Admission._room_at
    monkeypatch.setattr(Admission, "_room_at", lambda self, version: before(self, self.version))


def keeps_settled_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that the checkpoint has settled are kept, too."""
    before = Admission.keep

    def keep(self: Admission, kept: Mapping[int, Set[int]]) -> list[int]:
        end, self._next_group = self._next_group, 0
        started = before(self, kept)
        self._next_group = max(end, self._next_group)
        return started

    monkeypatch.setattr(Admission, "keep", keep)
    monkeypatch.setattr(kept_groups.KeptGroups, "drop", lambda self, unfit: 0)


def forgets_the_groups_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that were skipped to reach a kept one are never drawn."""
    before = Admission.keep

    def keep(self: Admission, kept: Mapping[int, Set[int]]) -> list[int]:
        redraw = list(self._redraw)
        started = before(self, kept)
        self._redraw = [group for group in self._redraw if group in redraw]
        return started

    monkeypatch.setattr(Admission, "keep", keep)


def removes_what_is_being_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal keeps only what the newest complete checkpoint needs."""
    monkeypatch.setattr(Retention, "saving", lambda self, step, history: self._saving.update({step: history}))
    before = Retention.keeps

    def keeps(self: Retention, *arguments: object) -> bool:
        saving, self._saving = self._saving, {}
        try:
            return before(self, *arguments)  # type: ignore[arg-type]
        finally:
            self._saving = saving

    monkeypatch.setattr(Retention, "keeps", keeps)


def continues_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept group starts with the version at which the run resumes, whatever its tokens are."""
    before = Admission.keep

    def keep(self: Admission, kept: Mapping[int, Set[int]]) -> list[int]:
        return before(self, {group: {self.version} for group in kept})

    monkeypatch.setattr(Admission, "keep", keep)


def takes_the_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tidying keeps the first of several records of a group."""
    monkeypatch.setattr(kept_groups.Superseded, "later", lambda self, head: _first(self, head["group"]))


def _first(self: kept_groups.Superseded, group: int) -> bool:
    seen: set[int] = self.__dict__.setdefault("seen", set())
    again = group in seen
    seen.add(group)
    return again


def keeps_no_unfinished_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tidying removes what is not finished."""
    monkeypatch.setattr(kept_groups.Superseded, "later", lambda self, head: head["kind"] == "unfinished")


PACES = [Pace(), Pace(max_staleness=2), Pace(2, 2, 3), Pace(1, 2, 4), Pace(2, 4, 7)]


def all_runs() -> tuple[int, int]:
    cases = itertools.product(PACES, (1, 2), (0, 1, 2), (0, 1, 3), (0, 1, 3))
    used = [run_with_crashes(*case) for case in cases]
    return sum(finished for finished, _ in used), sum(unfinished for _, unfinished in used)


def test_groups_of_before_a_crash_are_used_again() -> None:
    finished, unfinished = all_runs()
    assert finished > 500 and unfinished > 50


@pytest.mark.parametrize(
    "mutant",
    [
        last_version_counts,
        counts_as_the_base,
        every_history_is_this_one,
        keeps_everything,
        keeps_settled_groups,
        forgets_the_groups_between,
        removes_what_is_being_saved,
        continues_as_new,
        takes_the_first_record,
        keeps_no_unfinished_group,
    ],
)
def test_each_rule_is_needed(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        all_runs()
