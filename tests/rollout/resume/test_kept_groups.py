"""The order in which kept groups are used again, where the bound has no room for all of them."""

from megarl.config.derived.staleness import Pace
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.admission.admission import Admission
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import PartialResponse, UnfinishedGroup
from megarl.rollout.resume.journal_records import EpochRecord, encode_group, encode_unfinished
from megarl.rollout.resume.kept_groups import KeptGroups
from megarl.rollout.resume.lineage import INITIAL

VERSION = 3  # at which the run resumes


def finished(group: int, version: int) -> bytes:
    row = Trajectory(group, 0, [5], [9], [-0.5], (VersionSpan(version, 0, 1),), "stop", 0.0, {})
    return encode_group([row], "a problem")


def unfinished(group: int, version: int) -> bytes:
    part = ResponsePart([9], [-0.5], (VersionSpan(version, 0, 1),))
    return encode_unfinished(group, UnfinishedGroup({(0, 0): PartialResponse("", part)}, {}), "a problem")


def kept_groups(*records: bytes) -> KeptGroups:
    kept = KeptGroups([EpochRecord(INITIAL, {}).encode(), *records])
    kept.resume(INITIAL, VERSION)
    return kept


def test_finished_groups_come_first_and_then_those_with_the_lower_ids() -> None:
    kept = kept_groups(unfinished(1, 3), finished(4, 3), unfinished(0, 3), finished(2, 3), unfinished(3, 3))
    assert list(kept.versions()) == [2, 4, 0, 1, 3]


def admission(groups: int) -> Admission:
    """A synchronous one after `VERSION` steps: it has room for the `groups` of one step, all of that version."""
    fresh = Admission(groups, Pace())
    fresh.load_state_dict({**fresh.state_dict(), "steps": VERSION})
    fresh.set_version(VERSION)
    return fresh


def test_of_equally_old_groups_the_finished_is_used_again_and_then_one_that_has_begun_and_then_a_fresh_one() -> None:
    """Group 0 has begun and group 1 has finished; group 2 is fresh."""
    kept = kept_groups(unfinished(0, 3), finished(1, 3))
    one = admission(1)
    assert (one.keep(kept.versions()), one.admit()) == ([1], [])
    two = admission(2)
    assert (two.keep(kept.versions()), two.admit()) == ([1, 0], [])
    three = admission(3)
    assert (three.keep(kept.versions()), three.admit()) == ([1, 0], [2])
