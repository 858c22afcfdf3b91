"""One record for each replica of the pool, and everything that changes its state. No clock, no calls.

A replica serves if it is `READY` and neither drained nor removed. It keeps its requests while it serves without a break
(`Lease`); after a break they continue elsewhere, even if it serves again.

A new replica has no weights: it joins with the next publication. The members of a publication do not change, so a
replica that is removed during one ends after it. An index is never reused.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from megarl.common.errors import NoReplicaLeft, ReplicaFailed
from megarl.rollout.fleet.speed import Progress, Work
from megarl.rollout.transport.rpc import ReplicaClient
from megarl.telemetry.trace import events

logger = logging.getLogger(__name__)


class State(Enum):
    """What the engine of a replica is ready for."""

    STARTING = "it starts for the first time"
    NEW = "it is up, and joins with the next publication"
    READY = "it has the weights of the last publication that it took part in"
    LOST = "it failed, or is too slow"
    RESTARTING = "another engine starts in its place"
    JOINING = "it has dropped its requests, and serves as soon as the publication is complete"


@dataclass(eq=False)
class Replica:
    """A replica from the start of its engine to its end.

    `client`: calls its actor; None before that is up and after it has ended. `drained`, `leaving`: it was drained or
    removed and gets no requests, whatever its state. `failure`: why it was lost; kept until it serves again.
    `condemned`: it answers, but must not serve again. `published`: it takes part in the current publication. `placed`:
    Ray does not count its place as free. `epoch`: a new number, rising across the pool, each time it gives up its
    requests. `load`: requests placed on it that have not ended. `limit`: how many it may have (`router.py`).
    """

    index: int
    state: State
    client: ReplicaClient | None = None
    drained: bool = False
    leaving: bool = False
    failure: ReplicaFailed | None = None
    condemned: bool = False
    published: bool = False
    placed: bool = True
    epoch: int = 0
    load: int = 0
    limit: float = math.inf
    progress: Progress = field(default_factory=Progress)
    work: Work = field(default_factory=Work)

    @property
    def serves(self) -> bool:
        """True if requests are placed on it."""
        return self.state is State.READY and not (self.drained or self.leaving)

    @property
    def coming(self) -> bool:
        """True if it restarts, or serves as soon as the publication is complete."""
        return self.state in (State.RESTARTING, State.JOINING)

    @property
    def lost(self) -> bool:
        """True if it failed and does not serve, even while it is being replaced."""
        return self.failure is not None and not self.leaving

    @property
    def does(self) -> str:
        """Its status in one word."""
        if self.state is State.STARTING:
            return "starting"
        if self.leaving:
            return "leaving"
        if self.coming or self.state is State.NEW:
            return "joining"
        return "lost" if self.lost else "drained" if self.drained else "serving"

    def lease(self) -> Lease:
        """Return the lease of requests that are placed on it now."""
        return Lease(self, self.client, self.epoch)


@dataclass(frozen=True)
class Lease:
    """A replica as it was when requests were placed on it."""

    replica: Replica
    client: ReplicaClient | None
    epoch: int

    @property
    def valid(self) -> bool:
        """True if the replica has served without a break since then."""
        return self.epoch == self.replica.epoch

    @property
    def same_actor(self) -> bool:
        """True if the replica still has the actor that it had then."""
        return self.client is self.replica.client

    @property
    def drained(self) -> bool:
        """True if the actor can be asked for its last tokens: the replica gives up its requests, and is not lost."""
        return self.same_actor and (self.replica.drained or self.replica.leaving)

    @property
    def ended(self) -> ReplicaFailed | None:
        """Why the replica stopped working on the requests; None if it still does."""
        index = self.replica.index
        if self.valid:
            return None
        if not self.same_actor:
            return ReplicaFailed(index, f"replica {index} has been replaced")
        if self.replica.failure is not None:
            return self.replica.failure
        if self.drained:
            return ReplicaFailed(index, f"replica {index} is drained")
        return ReplicaFailed(index, f"replica {index} was lost, and serves again without its earlier requests")


class ReplicaTable:
    """The replicas by ascending index, and the current publication.

    `missing`: how many were lost with their node and found no other place. `publishing`: a publication runs.
    `expects`: the trainer publishes when asked to.
    """

    def __init__(self, clients: Mapping[int, ReplicaClient], *, replaces: bool) -> None:
        """`clients`: of the first replicas, which serve. `replaces`: replicas that fail in a sync are replaced."""
        self._replicas = {index: Replica(index, State.READY, clients[index]) for index in sorted(clients)}
        self._next = max(self._replicas, default=-1) + 1
        self._epochs = itertools.count(1)
        self._replaces = replaces
        self.missing = 0
        self.publishing = False
        self.expects = False
        self.on_change: Callable[[], object] = lambda: None  # called when a replica comes or goes, or may not come

    def __getitem__(self, index: int) -> Replica:
        """Return a replica; raises KeyError if it does not exist or has left."""
        return self._replicas[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __contains__(self, index: int) -> bool:
        return index in self._replicas

    @property
    def serving(self) -> list[Replica]:
        """The replicas on which requests are placed."""
        return [each for each in self if each.serves]

    @property
    def members(self) -> list[Replica]:
        """The replicas that take part in the current publication, or else in the next one."""
        if self.publishing:
            return [each for each in self if each.published]
        return [each for each in self if each.state is not State.STARTING and not each.leaving]

    @property
    def idle(self) -> list[Replica]:
        """The replicas that hold devices and serve nothing, although they have not failed."""
        waits = (State.STARTING, State.NEW)
        return [
            each for each in self if not each.leaving and not each.failure and (each.drained or each.state in waits)
        ]

    @property
    def lost(self) -> dict[int, ReplicaFailed]:
        """Why each lost replica does not serve, the last lost one at the end."""
        lost = sorted((each for each in self if each.lost), key=lambda each: each.epoch)
        return {each.index: each.failure for each in lost if each.failure is not None}

    @property
    def unplaced(self) -> int:
        """The number of replicas that may not have taken their place yet."""
        return sum(not each.placed for each in self)

    @property
    def under_way(self) -> bool:
        """True if a replica may come to serve without further action.

        A failed weight sync leaves replicas that refuse every call, and then restarts them. The pool sees the refusals
        before it is asked for the restart, so a replacement may be coming while a sync runs.
        """
        return (self.publishing and self._replaces) or any(each.coming for each in self)

    @property
    def coming(self) -> bool:
        """True if a replica may come to serve: it is on its way, or the trainer can be asked for a sync."""
        return self.under_way or (self.expects and self._replaces)

    def serves_without(self, index: int) -> bool:
        """Return whether another replica serves training."""
        return any(each.index != index for each in self.serving)

    def none_left(self, waited: str = "") -> NoReplicaLeft:
        """Return the error of requests that no replica serves: `waited`, then the reason of the last loss."""
        none = ReplicaFailed(-1, "all replicas have left the pool")
        index, reason = next(reversed(self.lost.items()), (-1, none))
        error = NoReplicaLeft(index, f"{waited}{reason}")
        error.__cause__ = reason
        return error

    # Replicas that come and go.

    def leave_out(self, used: Iterable[int]) -> None:
        """Do not give new replicas these indices, which ended engines had."""
        self._next = max([self._next, *(index + 1 for index in used)])

    def reserve(self, count: int) -> list[int]:
        """Return the indices of `count` new replicas, whose engines start."""
        indices = list(range(self._next, self._next + count))
        self._next += count
        self._replicas |= {index: Replica(index, State.STARTING, placed=False) for index in indices}
        return indices

    def placed(self, index: int) -> None:
        """Record that a new replica has taken its place, which Ray does not count as free."""
        self._replicas[index].placed = True

    def started(self, index: int, client: ReplicaClient) -> None:
        """Record that the engine of a new replica is up."""
        new = self._replicas[index]
        new.state, new.client, new.placed = State.NEW, client, True

    def forget(self, index: int) -> ReplicaClient | None:
        """Forget a replica that left or did not start; return its closed client, whose actor the caller ends."""
        replica = self._replicas.pop(index)
        client, replica.client = replica.client, None
        if client is not None:
            client.close()
        return client

    def give_up(self, index: int) -> ReplicaClient | None:
        """Take a replica out of the pool and count it as missing. Its responses continue elsewhere. As `forget`."""
        self._withdraw(self._replicas[index])
        self.missing += 1
        return self.forget(index)

    def leave(self, index: int) -> None:
        """Remove a replica; its responses continue elsewhere. `EnginePool.can_end` says when its engine can end."""
        replica = self._replicas[index]
        replica.leaving, replica.failure = True, None
        self._withdraw(replica)

    def drain(self, index: int) -> None:
        """Give a replica no more requests; it still takes part in publications. Its responses continue elsewhere."""
        self._replicas[index].drained = True
        self._withdraw(self._replicas[index])

    def undrain(self, index: int) -> None:
        """Undo `drain`: the replica serves again after the next publication."""
        replica = self._replicas[index]
        replica.drained = False
        if replica.state is State.READY:
            replica.state = State.NEW

    # Replicas that are lost and replaced.

    def lose(self, index: int, reason: ReplicaFailed) -> None:
        """Give a failed replica no more requests; its responses continue elsewhere.

        Does nothing if it is already lost, leaving or gone.
        """
        replica = self._replicas.get(index)
        if replica is None or replica.client is None or replica.leaving or replica.failure is not None:
            return
        replica.state, replica.failure = State.LOST, reason
        events.fault("engine", str(reason), replica=index)
        self._withdraw(replica)

    def condemn(self, index: int, reason: str) -> None:
        """Lose a replica that still answers, and have the next sync replace it."""
        replica = self._replicas[index]
        assert replica.client is not None  # it has answered
        replica.condemned = True
        self.lose(index, ReplicaFailed(index, f"replica {index} {reason}; {replica.client.where}"))
        logger.warning("replica %d %s; it is drained and replaced", index, reason)

    def note_progress(self, lease: Lease, progress: tuple[int, float], now: float, patience_s: float) -> None:
        """Record tokens and the seconds they took; condemn a replica much slower than the others (`Progress.note`).

        The last one that serves training stays.
        """
        if not lease.valid:
            return
        replica = lease.replica
        reason = replica.progress.note(*progress, [each.progress for each in self], now, patience_s)
        if reason and self.serves_without(replica.index):
            self.condemn(replica.index, reason)

    def quarantine(self, index: int, reason: str) -> tuple[bool, str]:
        """Take a replica out because of what it generates; the next sync replaces it.

        Its work continues elsewhere. The last one that serves training stays. Returns whether it was taken out, and a
        message.
        """
        replica = self._replicas.get(index)
        if replica is None or replica.client is None or replica.leaving or replica.failure is not None:
            return False, f"replica {index} does not serve; the next publication readmits or replaces it"
        if not self.serves_without(index):
            return False, f"replica {index} stays, because no other replica serves training"
        self.condemn(index, f"was quarantined by the trainer: {reason}")
        return True, f"replica {index} is quarantined until the next publication has replaced it"

    def restarting(self, index: int) -> None:
        """Record that a replica's engine is being replaced."""
        self.lose(index, ReplicaFailed(index, f"replica {index} is being replaced"))
        self._replicas[index].state = State.RESTARTING

    def restarted(self, replica: Replica, client: ReplicaClient) -> None:
        """Record that the new engine is up; it serves after `admit`."""
        assert replica.client is not None
        replica.client.close()
        replica.state, replica.client, replica.condemned = State.JOINING, client, False
        self.on_change()

    def not_restarted(self, replica: Replica, reason: ReplicaFailed) -> None:
        """Record that a replica's new engine did not come up; it becomes the last lost one."""
        replica.state, replica.failure = State.LOST, None
        self.lose(replica.index, reason)
        self.on_change()

    def join(self, index: int) -> None:
        """Record that a lost replica has dropped its requests, and serves after `admit`."""
        replica = self._replicas.get(index)
        if replica is not None and replica.state is State.LOST:
            replica.state = State.JOINING

    def _withdraw(self, replica: Replica) -> None:
        """Give a replica no more requests, and stop counting those it has."""
        replica.epoch = next(self._epochs)
        replica.load, replica.limit, replica.progress = 0, math.inf, Progress()
        self.on_change()

    # Publications.

    def begin_sync(self) -> None:
        """Record that a publication begins or restarts: new replicas join with it."""
        self.publishing = False
        members = self.members
        for each in self:
            each.published = each in members
            if each.published and each.state is State.NEW:
                each.state = State.JOINING
        self.publishing = True

    @property
    def sync_replaces(self) -> bool:
        """True if the current publication replaces replicas that refuse it."""
        return self.publishing and self._replaces

    def excuse_leaving(self) -> None:
        """Record that the current publication continues without the leaving replicas."""
        for each in self:
            each.published &= not each.leaving

    def end_sync(self) -> None:
        """Record that no publication runs: it is complete, or its trainer has gone."""
        self.publishing = False
        for each in self:
            each.published = False
        self.on_change()

    def admit(self) -> None:
        """Record that a publication is complete: joining replicas serve unless they are leaving or drained."""
        for each in self:
            if each.state is State.JOINING:
                if each.lost:
                    events.recovery("engine", f"replica {each.index} serves again", replica=each.index)
                each.state, each.failure = State.READY, None
        self.end_sync()

    def go_on_without(self, indices: Collection[int]) -> bool:
        """Return whether a publication without these replicas still reaches one that serves training."""
        members = {each.index for each in self.members} - set(indices)
        return any(each.index in members for each in self.serving)
