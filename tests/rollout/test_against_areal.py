"""Admission against AReaL's `StalenessManager` (areal 1.0.4), which limits how many rollouts may start.

A rollout there is a prompt group here, its version the number of trained batches behind the served weights. Then its
capacity is our room: both allow (staleness + version + 1) batches in total, less what runs, waits or was trained. A
rejected rollout frees its place there, as a replaced group does here.

What differs, and is left out: its `max_concurrent_rollouts` limits what runs, for which there is no key here. A failed
group counts towards its step here, and is a rejected rollout there. Staleness between two updates of one batch is
rounded down to whole batches there. And it limits starts only: which groups a batch takes, and that it waits for those
about to be too old, is no part of it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission
from tests.support.checkout import EXCERPTS


@dataclass(frozen=True)
class CapacityRun:
    """Events of a run, and the capacity that AReaL reports after each.

    Events: `submit N` rollouts, `accept` or `reject` one (the oldest that runs), `train` one batch, `version N` is
    served (in trained batches), `resume` from a checkpoint of the moment. `pace`: the fields of ours.
    """

    groups: int
    pace: dict[str, int]
    events: list[str]
    capacities: list[int]


RECORDED = [CapacityRun(**run) for run in json.loads((EXCERPTS / "areal_staleness.json").read_text())["runs"]]


def rooms(run: CapacityRun) -> Iterator[int]:
    """Yield the room of an admission after each event of a run."""
    pace, refill = Pace(**run.pace), len(run.events)
    admission = Admission(run.groups, pace, refill=refill)
    admission.set_version(0)
    waiting: list[int] = []  # groups that AReaL has submitted, oldest first
    started: dict[int, int] = {}
    held_back: list[int] = []  # groups that admission has started, and AReaL has not submitted yet
    step = 0
    for event in run.events:
        name, _, number = event.partition(" ")
        if name == "submit":
            if len(held_back) < int(number):
                new = admission.admit()
                started |= dict.fromkeys(new, admission.version)
                held_back += new
            waiting += held_back[: int(number)]
            del held_back[: int(number)]
        elif name == "accept":
            group = waiting.pop(0)
            admission.finish(group, True, [started[group]])
        elif name == "reject":
            group = waiting.pop(0)
            assert admission.replace(group, [started[group]])
        elif name == "train":
            assert admission.batch(step) is not None
            filtered = len(admission.taken(step).replaced)
            admission.commit(step, trained=run.groups, filtered=filtered, dropped_stale=0, failed=0)
            step += 1
        elif name == "version":
            admission.set_version(int(number) * pace.updates_per_step)
        elif name == "resume":
            state, version = admission.state_dict(), admission.version
            admission = Admission(run.groups, pace, refill=refill)
            admission.load_state_dict(state)
            admission.set_version(version)
            waiting, held_back = [], []
        yield admission.room + len(held_back)


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: str(Pace(**run.pace)))
def test_room_is_areal_s_capacity(run: CapacityRun) -> None:
    for event, room, capacity in zip(run.events, rooms(run), run.capacities, strict=True):
        assert room == capacity, event  # after another one the events cannot go on
