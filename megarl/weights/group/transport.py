"""One process group of all sending trainer ranks and all engine workers, and each member's part in a sync.

The group is independent of torch's default group and exists for one *generation*: after any failure it is aborted, and
the remaining members form the next one. Its ranks are the sending trainer ranks first, then the workers of each replica
in turn. A member tracks its own progress, and a thread waits for the end of the sync (`stage.py`). A member that fails,
or whose deadline passes, ends the sync for all. Every wait has a deadline.

Tensors that are broadcast may have any shape.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.distributed import BroadcastOptions, Work

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted, WeightSyncError
from megarl.common.process.threads import call_in_thread
from megarl.weights.group.backends import BACKENDS
from megarl.weights.group.relay import Backend, MemberPlace
from megarl.weights.group.stage import MemberProgress, StageWatch, end_key
from megarl.weights.group.store import STORE_TIMEOUT_S, SyncStore

logger = logging.getLogger(__name__)

POLL_S = 0.2  # upper bound on noticing an abort
OPERATION_SLACK_S = 5.0  # how much longer the library's own timeouts are than our deadlines
_ABORTED: list[object] = []  # keeps aborted groups: destroying one blocks until its last operation times out


@dataclass(frozen=True)
class GroupMembers:
    """The members of a group. `members[i]` names rank i, e.g. `trainer rank 0`, `engine replica 1 worker 0`."""

    generation: int
    senders: tuple[int, ...]  # global trainer ranks
    replicas: tuple[str, ...]
    workers: tuple[int, ...]  # the number per replica
    backend: str  # a key of BACKENDS
    timeout_s: float  # of one operation; that of NCCL's can only be set for all operations of a group

    @property
    def names(self) -> list[str]:
        """The name of each member, in the order of group ranks."""
        names = [f"trainer rank {rank}" for rank in self.senders]
        for replica, count in zip(self.replicas, self.workers, strict=True):
            names += [f"engine {replica} worker {worker}" for worker in range(count)]
        return names

    def offset(self, replica: int) -> int:
        """Return the group rank of the replica's worker 0."""
        return len(self.senders) + sum(self.workers[:replica])

    def replica_of(self, member: int) -> int | None:
        """Return the index of the replica that a group rank belongs to; None for trainer ranks."""
        if member < len(self.senders):
            return None
        return next(replica for replica in range(len(self.workers)) if member < self.offset(replica + 1))

    def to_json(self) -> str:
        """Return the text that the leader publishes in the store."""
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str | bytes) -> GroupMembers:
        """Return the members that `to_json` gave as this text. Raises ValueError for a text of another form."""
        return TypeAdapter(cls).validate_json(text, strict=True)


class Group:
    """This process's membership in one generation of the group.

    `stage`: the prefix of the current stage's keys. `buckets`: the number of broadcasts of the current sync.
    `deadline`: when all waits of the stage end, by `time.monotonic`. `on_streams`: operations run on streams, and
    polling observes their end.

    Every method that waits may raise PeerTimeout (this member's deadline has passed), SyncAborted (another member
    failed first) or ConnectionLost.
    """

    def __init__(self, store: SyncStore, members: GroupMembers, rank: int | None, name: str = "") -> None:
        """`rank`: this process's group rank; None for a trainer rank that broadcasts nothing, which needs a `name`."""
        self.store = store
        self.members = members
        self.rank = rank
        self.names = members.names
        self._kind = BACKENDS[members.backend]
        self.on_streams = self._kind.on_streams
        self.name = name or self.names[rank if rank is not None else 0]
        self.progress = MemberProgress(self.name)
        self._backend: Backend | None = None
        self._prefix = f"g{members.generation}"
        self.stage = f"{self._prefix}/join"
        self._connection: SyncStore | None = None
        self._watch: StageWatch | None = None
        self.buckets = 0
        self.deadline = self._started = time.monotonic()

    def aborted(self) -> bool:
        """Return whether a member has ended the current stage because it failed."""
        return self.abort_reason is not None

    @property
    def abort_reason(self) -> str | None:
        """The reason why the current stage was aborted, or None."""
        return None if self._watch is None else self._watch.abort_reason

    def wait_end(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait at most `timeout_s` seconds for the end of the stage, and return its value."""
        assert self._watch is not None
        return self._watch.wait(timeout_s)

    def join(self, timeout_s: float, *, loads_in_place: bool = True) -> None:
        """Report this member as ready, wait for all others, and connect. Every member must call it.

        `loads_in_place`: False for an engine worker that cannot take the tensors of several layers mixed.

        The leader ends the stage `ready` when all members have come (`await_members`), or names the absent ones.
        If it raises, the group was aborted: a half-made NCCL group would block its process when it is destroyed.
        """
        assert self.rank is not None, "a trainer rank that broadcasts nothing is not a member"
        try:
            self.enter("ready", timeout_s + OPERATION_SLACK_S)  # the leader's wait ends first and names the absent
            self.store.put(self.key("ready", self.rank), {"loads_in_place": loads_in_place})
            while (end := self.wait_end(POLL_S)) is None:
                self.check("the leader to see all members of the weight-sync group")
            if "abort" in end:
                raise SyncAborted(end["abort"])
            self.enter("connect", self._remaining())
            self._connect(max(1.0, self._remaining()))
        except BaseException:
            self.abort()
            raise

    def _connect(self, timeout_s: float) -> None:
        """Make the process group and broadcast once, which makes NCCL's communicator.

        That is a blocking call without a timeout: a member that dies meanwhile would stop all others. So the call runs
        in a thread, which is abandoned if it does not return in time, and then aborts its group.
        """
        lock, abandoned = threading.Lock(), False
        device = self._kind.device
        number = torch.cuda.current_device() if device == "cuda" else -1

        def connect() -> None:
            if device == "cuda":
                torch.cuda.set_device(number)
            backend = self._make_backend(timeout_s)
            with lock:
                late = abandoned
                if not late:
                    self._backend = backend
            if late:  # `abort` of the group has not seen it
                self._abort_backend(backend)
                return
            self.broadcast(torch.zeros(1, device=device), 0).wait("the first broadcast")

        self.progress.work("connects the weight-sync group")
        connecting = call_in_thread(connect, name="weight-sync-connect")
        try:
            while not wait([connecting], POLL_S).done:
                self.check("all members to connect the weight-sync group")
        except BaseException:
            with lock:
                abandoned = True
            raise
        connecting.result()

    def _make_backend(self, timeout_s: float) -> Backend:
        assert self.rank is not None
        store = self.store.prefixed(f"{self._prefix}/rendezvous")
        # Our own deadline, whose error names members, comes before the library's timeout.
        operation_s, senders = self.members.timeout_s + OPERATION_SLACK_S, len(self.members.senders)
        own, keys = self.store.connection(), f"{self._prefix}/relay"
        place = MemberPlace(self.name, self.rank, len(self.names), timeout_s, operation_s, senders, own, keys)
        return self._kind.make(store, place)

    def begin(self, sync: int, buckets: int, timeout_s: float) -> None:
        """Enter sync number `sync` of this generation, of `buckets` broadcasts. All its waits have one deadline."""
        self.buckets = buckets
        self.enter(f"s{sync}", timeout_s)

    def enter(self, stage: str, timeout_s: float) -> None:
        """Enter a stage: watch for its end, with a new deadline."""
        if self._watch is not None:
            self._watch.join()
        self._connection = self._connection or self.store.connection()
        self.stage = f"{self._prefix}/{stage}"
        self._started = time.monotonic()
        self.deadline = self._started + timeout_s
        self.progress = MemberProgress(self.name)
        # After its own deadline a member ends the stage; the slack is for the leader's last calls.
        limit = timeout_s + self.members.timeout_s + OPERATION_SLACK_S
        self._watch = StageWatch(self._connection, self.stage, self.progress, self.name, limit)

    def key(self, *parts: str | int | None) -> str:
        """Return the store's key of `parts` for the current stage."""
        return "/".join([self.stage, *map(str, parts)])

    def _remaining(self) -> float:
        return self.deadline - time.monotonic()

    def broadcast(self, tensor: torch.Tensor, root: int, bucket: int | None = None) -> PendingBroadcast:
        """Start one broadcast from group rank `root`. Do not touch the tensor until `wait` of the result returns."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(1.0, self._remaining()) + OPERATION_SLACK_S)
        if bucket is not None:
            self.progress.enter(bucket)
        try:
            assert self._backend is not None  # connected
            work = self._backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise self.broken(error, bucket) from error
        return PendingBroadcast(self, work, tensor, bucket)

    def check(self, waiting_for: str, bucket: int | None = None) -> None:
        """Raise SyncAborted if a member has ended the stage, PeerTimeout if the deadline has passed."""
        reason = self.abort_reason
        if reason is not None:
            self.progress.freeze()
            raise SyncAborted(reason)
        if self._remaining() <= 0:
            raise self._expired(waiting_for, bucket)

    def post_abort(self, reason: str) -> None:
        """End the stage for all members. A later reason does not replace the first one."""
        self.progress.freeze()
        self.store.put_once(end_key(self.stage), {"abort": reason})

    def fail(self, error: BaseException) -> None:
        """End the stage for all members because of a failure of this one, which its answer names, and leave the group.

        An unreachable leader raises nothing here.
        """
        failure = str(error) or repr(error)
        self.progress.fail(failure, secondary=isinstance(error, SyncAborted | ConnectionLost | PeerTimeout))
        try:
            self.post_abort(failure if failure.startswith(self.name) else f"{self.name}: {failure}")
        except RuntimeError:
            logger.exception("%s could not report the failure of a weight sync", self.name)
        self.abort()

    def abort(self) -> None:
        """Leave this generation after a failure. Running operations end on their own at their deadline."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._abort_backend(backend)

    def _abort_backend(self, backend: Backend) -> None:
        if self.on_streams:
            backend.abort()
        _ABORTED.append(backend)

    def close(self) -> None:
        """Leave a group in which no operation is running and nothing has failed here.

        NCCL's orderly shutdown would wait for all members, of which some may have aborted.
        """
        if self._backend is not None:
            if self.on_streams:
                self._backend.abort()
            else:
                self._backend.shutdown()
            self._backend = None

    def _expired(self, waiting_for: str, bucket: int | None) -> PeerTimeout:
        """Return the error of an expired wait. The leader finds out which member was missing."""
        self.progress.freeze(expired=True)
        where = "" if bucket is None else f" in bucket {bucket + 1} of {self.buckets}"
        return PeerTimeout(f"{self.name} waited {time.monotonic() - self._started:.1f} s for {waiting_for}{where}")

    def broken(self, error: Exception, bucket: int | None = None) -> WeightSyncError:
        """Return the error to raise for an operation that failed with `error`."""
        where = "" if bucket is None else f" in bucket {bucket + 1} of {self.buckets}"
        if isinstance(error, torch.OutOfMemoryError):
            return WeightSyncError(f"{self.name} had no memory{where}: {_first_line(error)}")
        if self._remaining() <= 0:
            return self._expired("a broadcast", bucket)
        self.progress.freeze()
        return ConnectionLost(f"{self.name} lost its connection{where}: {_first_line(error)}")


class PendingBroadcast:
    """One running broadcast."""

    def __init__(self, group: Group, work: Work, tensor: torch.Tensor, bucket: int | None) -> None:
        self._group, self._work, self._tensor, self._bucket = group, work, tensor, bucket

    def wait(self, what: str = "a broadcast") -> None:
        """Wait until the tensor may be read (on the sender also written) again, or until an abort or the deadline.

        `what`: names the awaited thing in the error.
        """
        group = self._group
        if self._bucket is not None:
            group.progress.wait_in_broadcast(self._bucket)
        while not self._done():
            group.check(what, self._bucket)
        try:
            self._work.wait()  # complete: this makes the current stream wait for it and raises its error
        except RuntimeError as error:
            raise group.broken(error, self._bucket) from error
        if self._bucket is not None:
            group.progress.work(f"works after bucket {self._bucket + 1} of {group.buckets}")

    def _done(self) -> bool:
        """Wait at most POLL_S, and return whether the broadcast has ended."""
        if self._group.on_streams:
            deadline = time.monotonic() + POLL_S
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.0005)
            return True
        if not self._work.is_completed():
            try:
                self._work.wait(timedelta(seconds=POLL_S))
            except RuntimeError:  # the wait has timed out (not completed), or the operation has failed (completed)
                return bool(self._work.is_completed())
        return True


def end_forming(store: SyncStore, generation: int, reason: str | None) -> None:
    """End the forming of a generation's group for all members: with an error, or with None as formed."""
    if reason is None:
        store.put_once(end_key(f"g{generation}/connect"), {"formed": True})
        return
    for stage in ("ready", "connect"):
        store.put_once(end_key(f"g{generation}/{stage}"), {"abort": reason})


def forming_failed(store: SyncStore, generation: int) -> bool:
    """Return whether the forming of a generation's group was ended by an error."""
    ends = (store.get(end_key(f"g{generation}/{stage}")) for stage in ("ready", "connect"))
    return any(end is not None and "abort" in end for end in ends)


def await_members(store: SyncStore, members: GroupMembers, timeout_s: float) -> bool:
    """Wait until all members of a new group are ready, and let them connect. Called by the leader only.

    Returns whether all engine workers load in place; False also if the forming has failed meanwhile. Raises PeerTimeout
    on all members, naming those that did not come within `timeout_s` seconds.
    """
    stage = f"g{members.generation}/ready"
    keys = {f"{stage}/ready/{rank}": name for rank, name in enumerate(members.names)}
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while not store.has(list(keys)):
        if forming_failed(store, members.generation):
            return False
        if time.monotonic() > deadline:
            absent = [name for key, name in keys.items() if not store.has([key])]
            reason = f"waited {timeout_s:.0f} s for {', '.join(absent)} to join the weight-sync group"
            end_forming(store, members.generation, reason)
            raise PeerTimeout(reason, failed_members=absent)
        time.sleep(pause)
        pause = min(2 * pause, POLL_S)
    answers = store.block_all(list(keys), STORE_TIMEOUT_S) or []
    store.put_once(end_key(stage), {"ready": True})
    return len(answers) == len(keys) and all(answer["loads_in_place"] for answer in answers)


def names_of(members: GroupMembers, failed_members: Sequence[str]) -> list[str]:
    """Return the replicas that the given names (`engine replica 1`, `engine replica 1 worker 0`) belong to."""
    workers = {name: members.replica_of(rank) for rank, name in enumerate(members.names)}
    workers |= {f"engine {name}": index for index, name in enumerate(members.replicas)}
    found = {workers.get(name) for name in failed_members}
    return [members.replicas[index] for index in sorted(index for index in found if index is not None)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
