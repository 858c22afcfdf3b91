"""The differences between the wall clocks of a run's hosts, from what must have happened during what. Pure.

Inside a host, events are in order: each process pairs its monotonic clock with the host's wall clock. Between hosts,
wall clocks differ by what NTP leaves. Two facts bound the difference to the host of trainer rank 0:

- all ranks are in one collective (`ranks_meet`) at the same moment, so none has left it before every one has entered;
- a replica pauses after the leader has begun to call it, and has resumed before the leader's calls have ended.

A host's clock is moved by the least amount that agrees with all of its bounds, which is not at all if they allow that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megarl.telemetry.trace.files import RunEvent
from megarl.telemetry.trace.lines import rank_process

EVIDENCE = ("ranks_meet", "sync_pause", "sync_resume", "paused")  # the events that bound differences
LEADER = rank_process(0)


@dataclass(frozen=True)
class OffsetBounds:
    """The seconds that have to be added to a host's clock: at least `low`, at most `high`."""

    low: float = -math.inf
    high: float = math.inf

    def __and__(self, other: OffsetBounds) -> OffsetBounds:
        """Return the bounds of both."""
        return OffsetBounds(max(self.low, other.low), min(self.high, other.high))

    @property
    def offset(self) -> float:
        """The number next to 0 within the bounds; if they contradict each other, the middle between them."""
        if self.low > self.high:
            return (self.low + self.high) / 2
        return min(max(0.0, self.low), self.high)


def host_offsets(events: Iterable[RunEvent]) -> dict[str, float]:
    """Return the seconds to add to the clock of each host so that it reads as that of trainer rank 0's host.

    `events`: at least those of `EVIDENCE`. Hosts without evidence are left out.
    """
    found = list(events)
    bounds: dict[str, OffsetBounds] = {}
    for host, bound in (*_of_meetings(found), *_of_publications(found)):
        bounds[host] = bounds.get(host, OffsetBounds()) & bound
    own = next((each.host for each in found if each.process == LEADER), None)
    return {host: 0.0 if host == own else bound.offset for host, bound in bounds.items()}


def _of_meetings(events: Iterable[RunEvent]) -> list[tuple[str, OffsetBounds]]:
    meetings: dict[object, list[RunEvent]] = {}
    for each in events:
        if each.name == "ranks_meet":
            meetings.setdefault(each.args.get("id"), []).append(each)
    bounds = []
    for members in meetings.values():
        if leader := next((each for each in members if each.process == LEADER), None):
            bounds += [(each.host, OffsetBounds(leader.begin - each.end, leader.end - each.begin)) for each in members]
    return bounds


def _of_publications(events: Iterable[RunEvent]) -> list[tuple[str, OffsetBounds]]:
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    paused = []
    for each in events:
        if each.version is None:
            continue
        if each.name == "sync_pause":
            begins[each.version] = min(begins.get(each.version, math.inf), each.begin)
        elif each.name == "sync_resume":
            ends[each.version] = max(ends.get(each.version, -math.inf), each.end)
        elif each.name == "paused":
            paused.append(each)
    return [
        (each.host, OffsetBounds(begins[each.version] - each.begin, ends[each.version] - each.end))
        for each in paused
        if each.version in begins and each.version in ends and not each.rolled_back
    ]


def moved(event: RunEvent, offsets: Mapping[str, float]) -> float:
    """Return when an event began, in Unix seconds of trainer rank 0's host."""
    return event.begin + offsets.get(event.host, 0.0)
