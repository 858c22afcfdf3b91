"""A run that is killed uses again what it had generated: within the bound, and each group once in the history."""

import itertools
from collections.abc import Callable, Mapping, Set
from typing import Any

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


def with_settled_groups(before: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def keep(self: Admission, kept: Mapping[int, Set[int]]) -> list[int]:
        end, self._next_group = self._next_group, 0
        started = before(self, kept)
        self._next_group = max(end, self._next_group)
        return started

    return keep


def without_the_groups_between(before: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def keep(self: Admission, kept: Mapping[int, Set[int]]) -> list[int]:
        redraw = list(self._redraw)
        started = before(self, kept)
        self._redraw = [group for group in self._redraw if group in redraw]
        return started

    return keep


def without_what_is_being_saved(before: Callable[..., bool]) -> Callable[..., bool]:
    def keeps(self: Retention, *arguments: object) -> bool:
        saving, self._saving = self._saving, {}
        try:
            return before(self, *arguments)
        finally:
            self._saving = saving

    return keeps


def as_the_first_record(before: object) -> Callable[..., bool]:
    def later(self: kept_groups.SupersededRecords, head: Mapping[str, Any]) -> bool:
        seen: set[int] = self.__dict__.setdefault("seen", set())
        again = head["group"] in seen
        seen.add(head["group"])
        return again

    return later


MUTANTS: dict[str, list[tuple[Any, str, Callable[[Any], Any]]]] = {
    "a version number means the same weights in every attempt": [
        (kept_groups, "recount", lambda before: lambda spans, common, lineage: tuple(spans))
    ],
    "tokens of lost updates count as of the version at which the run resumes": [
        (VersionSpan, "counts_as", lambda before: property(lambda span: span.version - span.lost))
    ],
    "the lineage is not looked at, only the version of the checkpoint": [
        (kept_groups, "common_version", lambda before: lambda other, resumed, version: version)
    ],
    "groups are kept without regard to what the steps within their bound can take": [
        (Admission, "_room_at", lambda before: lambda self, version: before(self, self.version))
    ],
    "groups that the checkpoint has settled are kept, too": [
        (Admission, "keep", with_settled_groups),
        (kept_groups.KeptGroups, "drop", lambda before: lambda self, unfit: 0),
    ],
    "the groups that were skipped to reach a kept one are never drawn": [
        (Admission, "keep", without_the_groups_between)
    ],
    "the journal keeps only what the newest complete checkpoint needs": [
        (Retention, "saving", lambda before: lambda self, step, history: self._saving.update({step: history})),
        (Retention, "keeps", without_what_is_being_saved),
    ],
    "a kept group starts with the version at which the run resumes, whatever its tokens are": [
        (Admission, "keep", lambda before: lambda self, kept: before(self, {group: {self.version} for group in kept}))
    ],
    "the tidying keeps the first of several records of a group": [
        (kept_groups.SupersededRecords, "later", as_the_first_record)
    ],
    "the tidying removes what is not finished": [
        (kept_groups.SupersededRecords, "later", lambda before: lambda self, head: head["kind"] == "unfinished")
    ],
}


PACES = [Pace(), Pace(max_staleness=2), Pace(2, 2, 3), Pace(1, 2, 4), Pace(2, 4, 7)]


def all_runs() -> tuple[int, int]:
    cases = itertools.product(PACES, (1, 2), (0, 1, 2), (0, 1, 3), (0, 1, 3))
    used = [run_with_crashes(*case) for case in cases]
    return sum(finished for finished, _ in used), sum(unfinished for _, unfinished in used)


def test_groups_of_before_a_crash_are_used_again() -> None:
    finished, unfinished = all_runs()
    assert finished > 500 and unfinished > 50


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, changed in MUTANTS[mutant]:
        monkeypatch.setattr(owner, name, changed(getattr(owner, name)))
    with pytest.raises((AssertionError, ValueError)):
        all_runs()
