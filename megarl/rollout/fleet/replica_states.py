"""The state of each replica of the pool: it serves, is lost, is drained, comes or goes.

Requests are placed on replicas that serve. One that is lost, is drained or leaves gets no more, and what it works on
goes on elsewhere. It may serve again later, but without its requests of before.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.common.errors import NoReplicaLeft, ReplicaFailed
from megarl.rollout.fleet.membership import Membership
from megarl.rollout.fleet.replacements import Replacements
from megarl.rollout.fleet.replica_actors import ReplicaActors
from megarl.rollout.fleet.router import Dispatcher
from megarl.rollout.fleet.speed import ProgressRates
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lease:
    """A replica as requests were placed on it, and how often it had been lost before."""

    index: int
    replica: ActorHandle
    losses: int


class ReplicaStates:
    """Loses, drains, adds and removes replicas, and tells what each of them does.

    `lost`: all that do not serve because they failed, with the reason; the last one lost is at the end.
    `replaced_next`: those of them that answer, but must not serve again.
    """

    def __init__(
        self,
        actors: ReplicaActors,
        membership: Membership,
        replacements: Replacements,
        dispatcher: Dispatcher,
        rates: ProgressRates,
    ) -> None:
        self._actors, self._membership, self._replacements = actors, membership, replacements
        self._dispatcher, self._rates = dispatcher, rates
        self.lost: dict[int, ReplicaFailed] = {}
        self.replaced_next: set[int] = set()
        self._losses: Counter[int] = Counter()

    def service(self, index: int) -> Lease:
        """Return a replica as it is now, when requests are placed on it."""
        return Lease(index, self._actors.by_index[index], self._losses[index])

    def ended(self, service: Lease) -> ReplicaFailed | None:
        """Return why a replica does not work on what was placed on it any more; None if it does."""
        index = service.index
        if not self.is_same(service):
            return ReplicaFailed(index, f"replica {index} has been replaced")
        if index in self.lost:
            return self.lost[index]
        if self.is_drained(index):
            return ReplicaFailed(index, f"replica {index} is drained")
        if self._losses[index] != service.losses:
            return ReplicaFailed(index, f"replica {index} was lost, and serves again without its requests of before")
        return None

    def is_same(self, service: Lease) -> bool:
        """Tell whether a replica still has the actor that it had when requests were placed on it."""
        return self._actors.by_index.get(service.index) is service.replica

    def is_drained(self, index: int) -> bool:
        """Tell whether a replica gives up its requests because it is drained or leaves."""
        return index in self._membership.drained | self._membership.leaving

    def serves_without(self, index: int) -> bool:
        """Tell whether another replica serves training."""
        return bool(self._dispatcher.load.keys() - {index})

    def state_of(self, index: int) -> str:
        """Return what a replica does, in one word."""
        members = self._membership
        states = {
            "starting": index in members.starting,
            "leaving": index in members.leaving,
            "joining": index in members.new or self._replacements.comes(index),
            "lost": index in self.lost,
            "drained": index in members.drained,
        }
        return next((state for state, is_so in states.items() if is_so), "serving")

    def none_left(self, waited: str) -> NoReplicaLeft:
        """Return the error of requests that no replica serves, with the reason of the last loss after `waited`."""
        none = ReplicaFailed(-1, "all replicas have left the pool")
        index, reason = next(reversed(self.lost.items()), (-1, none))
        error = NoReplicaLeft(index, f"{waited}{reason}")
        error.__cause__ = reason
        return error

    def lose(self, index: int, reason: ReplicaFailed) -> None:
        """Send nothing more to a replica; its unfinished responses go on elsewhere after its next report."""
        if index in self._actors.by_index and index not in self.lost:
            self.lost[index] = reason
            events.fault("engine", str(reason), replica=index)
            self._withdraw(index)

    def _withdraw(self, index: int) -> None:
        """Place nothing more on a replica, and count nothing more of what it works on."""
        self._losses[index] += 1
        self._rates.forget(index)
        self._dispatcher.remove(index)

    def note_progress(self, service: Lease, progress: tuple[int, float]) -> None:
        """Record tokens and the seconds that responses took for them; lose a replica much slower than the others.

        Its work goes on elsewhere, and the next sync replaces it. The last one for training stays.
        """
        if self.ended(service) is not None:
            return
        reason = self._rates.note(service.index, *progress, time.monotonic())
        if reason and self.serves_without(service.index):
            self._replace_next(service.index, reason)

    def _replace_next(self, index: int, reason: str) -> None:
        """Send nothing more to a replica that answers, and have the next sync replace it."""
        self.replaced_next.add(index)
        self.lose(index, ReplicaFailed(index, f"replica {index} {reason}; {self._actors.describe(index)}"))
        logger.warning("replica %d %s; it is drained and replaced", index, reason)

    def quarantine(self, index: int, reason: str) -> tuple[bool, str]:
        """Take a replica out because of what it generates; the next sync replaces it.

        Its work goes on elsewhere. The last one for training stays. Returns whether it was taken out, and in words.
        """
        if index not in self._actors.by_index or index in self.lost:
            return False, f"replica {index} does not serve any more; the next publication brings or replaces it"
        if not self.serves_without(index):
            return False, f"replica {index} stays, because no other replica serves training"
        self._replace_next(index, f"was quarantined by the trainer: {reason}")
        return True, f"replica {index} is quarantined until the next publication has replaced it"

    def drain(self, index: int) -> None:
        """Send nothing more to a replica, which stays in the pool; its responses go on elsewhere after its next report.

        It goes on taking part in publications.
        """
        self._membership.drained.add(index)
        self._withdraw(index)

    def admit_drained(self, index: int) -> None:
        """End what `drain` began: the replica serves again after the next publication."""
        self._membership.drained.discard(index)
        if index not in self.lost:
            self._membership.new.add(index)

    def add(self, index: int, replica: ActorHandle) -> None:
        """Add a started replica, whose index `Membership.reserve` gave: it serves after the next publication."""
        self._actors.by_index[index] = replica
        self._membership.started(index)

    def leave(self, index: int) -> None:
        """Remove a replica; its responses go on elsewhere. `EnginePool.can_end` tells when its engine can be ended."""
        self._membership.leaving.add(index)
        self.lost.pop(index, None)
        self._withdraw(index)

    def forget(self, index: int) -> ActorHandle:
        """Forget a replica that has left; return its actor, which is to be ended."""
        self.lost.pop(index, None)
        self._membership.forget(index)
        return self._actors.remove(index)

    def give_up(self, index: int) -> ActorHandle:
        """Take a replica out of the pool, in which one is missing then; return its actor, which is to be ended.

        Its responses go on elsewhere from the tokens that it has reported.
        """
        self._withdraw(index)
        self._membership.missing += 1
        return self.forget(index)

    def go_on_without(self, indices: Collection[int]) -> bool:
        """Tell whether a publication without these replicas brings its version to one that serves training."""
        serving = self._dispatcher.load.keys()
        return bool(serving & set(self._membership.members) - set(indices) - self._membership.leaving)

    def admit_joining(self) -> None:
        """Let the replicas serve that join, except those that have left or are drained."""
        for index in self._replacements.take_joining():
            if self.lost.pop(index, None) is not None:
                events.recovery("engine", f"replica {index} serves again", replica=index)
            if index in self._actors.by_index and index not in self._dispatcher.load and not self.is_drained(index):
                self._dispatcher.add(index)
