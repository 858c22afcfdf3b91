"""One process group of all sending trainer ranks and all engine workers, and a store with the progress of each member.

The group is independent of torch's default group and exists for one *generation*: after any failure it is aborted, and
the remaining members form the next one. Its ranks are the sending trainer ranks first, then the workers of each replica
in turn. Every member also writes to a TCPStore of the leader how many broadcasts it has entered and left. So the error
of an expired wait can name the members that were waited for, and any member can release all others by posting an abort.
Every wait has a deadline.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted

logger = logging.getLogger(__name__)

POLL_S = 0.2  # upper bound of the time until an abort is noticed
STORE_TIMEOUT_S = 30.0  # of one store request; the store answers immediately unless its owner has ended
OPERATION_SLACK_S = 5.0  # so that our deadline, whose error names members, comes before the library's own timeout
_ABORTED: list[object] = []  # keeps aborted groups: destroying one blocks until its last operation times out


@dataclass(frozen=True)
class GroupMembers:
    """The members of a group. `members[i]` names rank i, e.g. `trainer rank 0`, `engine replica 1 worker 0`."""

    generation: int
    senders: tuple[int, ...]  # global trainer ranks
    replicas: tuple[str, ...]
    workers: tuple[int, ...]  # the number per replica
    backend: str  # "nccl" | "gloo"

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
        for replica, count in enumerate(self.workers):
            if self.offset(replica) <= member < self.offset(replica) + count:
                return replica
        return None

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str | bytes) -> GroupMembers:
        fields: dict[str, Any] = json.loads(text)
        for key in ("senders", "replicas", "workers"):
            fields[key] = tuple(fields[key])
        return cls(**fields)


class SyncStore:
    """One process's access to the store, whose values are JSON. Only `wait` blocks."""

    def __init__(self, host: str, port: int, *, server: bool = False, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self.host = host
        self._store = TCPStore(
            host, port, is_master=server, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.port = self._store.port

    def prefixed(self, prefix: str) -> PrefixStore:
        """Return a torch store over the keys with this prefix."""
        return PrefixStore(prefix, self._store)

    def put(self, key: str, value: object) -> None:
        """Set a key to a value that JSON can represent."""
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any | None:
        """Return the JSON value of a key, or None if the key is not set."""
        if not self._store.check([key]):
            return None
        return json.loads(self._store.get(key))

    def drop(self, key: str) -> None:
        """Delete a key."""
        self._store.delete_key(key)

    def wait(self, key: str, timeout_s: float, what: str, *, abort_key: str | None = None) -> Any:
        """Poll until `key` is set, and return its JSON value. `what`: what is waited for, for the error.

        Raises:
            PeerTimeout: the key was not set within `timeout_s` seconds.
            SyncAborted: `abort_key` was set.
        """
        began = now = time.monotonic()
        while (value := self.get(key)) is None:
            if abort_key is not None and (reason := self.get(abort_key)) is not None:
                raise SyncAborted(reason)
            if now > began + timeout_s:
                raise PeerTimeout(f"waited {timeout_s:.0f} s for {what}")
            # The pause grows with the time waited: a delay of a few percent, and few requests from many ranks.
            time.sleep(min(max(0.001, 0.04 * (now - began)), POLL_S / 2))
            now = time.monotonic()
        return value


class Group:
    """This process's membership in one generation of the group.

    Every method that waits may raise PeerTimeout (its message says who waited for whom), SyncAborted (another member
    failed first) or ConnectionLost.
    """

    def __init__(self, store: SyncStore, members: GroupMembers, rank: int | None) -> None:
        """`rank`: this process's group rank; None for a leader that sends nothing and only reads the store."""
        self.store = store
        self.members = members
        self.rank = rank
        self.names = members.names
        self._backend: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL; torch declares no type for their methods
        self._prefix = f"g{members.generation}"
        self._sync = -1
        self._buckets = 0
        self._deadline = self._started = time.monotonic()

    @property
    def name(self) -> str:
        """This member's name in messages."""
        return "the leader" if self.rank is None else self.names[self.rank]

    @property
    def abort_key(self) -> str:
        """The store's key for the reason of an abort."""
        return f"{self._prefix}/abort"

    def aborted(self) -> bool:
        """Tell whether a member has aborted this generation."""
        return self.store.get(self.abort_key) is not None

    def join(self, timeout_s: float) -> None:
        """Report this member ready, wait until all are, and connect. Every member must call it."""
        assert self.rank is not None, "a leader that sends nothing is not a member"
        self._begin(timeout_s)
        self.store.put(f"{self._prefix}/ready/{self.rank}", True)
        self._await_all_ready(timeout_s)
        remaining = timedelta(seconds=max(1.0, self._remaining()))
        store = self.store.prefixed(f"{self._prefix}/rendezvous")
        size = len(self.names)
        if self.members.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = remaining
            self._backend = ProcessGroupNCCL(store, self.rank, size, options)
        else:
            self._backend = ProcessGroupGloo(store, self.rank, size, timeout=remaining)
        device = "cuda" if self.members.backend == "nccl" else "cpu"
        self.broadcast(torch.zeros(1, device=device), 0).wait("the first broadcast")

    def _await_all_ready(self, timeout_s: float) -> None:
        absent = list(range(len(self.names)))
        pause = 0.002
        while absent := [i for i in absent if self.store.get(f"{self._prefix}/ready/{i}") is None]:
            self.check_abort()
            if self._remaining() <= 0:
                names = ", ".join(self.names[i] for i in absent)
                raise PeerTimeout(
                    f"{self.name} waited {timeout_s:.0f} s for {names} to join the weight-sync group",
                    failed_members=[self.names[i] for i in absent],
                )
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)

    def begin(self, sync: int, buckets: int, timeout_s: float) -> None:
        """Enter sync number `sync` of this generation, of `buckets` broadcasts. All its waits have one deadline."""
        if self.rank is not None:
            for stage in ("entered", "left", "report"):
                self.store.drop(self.key(stage, self.rank))
        self._sync, self._buckets = sync, buckets
        self._begin(timeout_s)

    def _begin(self, timeout_s: float) -> None:
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s

    def key(self, *parts: str | int | None) -> str:
        """Return the store's key of `parts` for the current sync."""
        return "/".join([self._prefix, f"s{self._sync}", *map(str, parts)])

    def _remaining(self) -> float:
        return self._deadline - time.monotonic()

    def broadcast(self, tensor: torch.Tensor, root: int, bucket: int | None = None) -> PendingBroadcast:
        """Start one broadcast from group rank `root`. Do not touch the tensor until `wait` of the result returns."""
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(1.0, self._remaining()) + OPERATION_SLACK_S)
        if bucket is not None:
            self.store.put(self.key("entered", self.rank), bucket + 1)
        try:
            work = self._backend.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._broken(error, bucket) from error
        return PendingBroadcast(self, work, tensor, bucket)

    def check(self, waiting_for: str, bucket: int | None = None) -> None:
        """Raise SyncAborted if a member has aborted, PeerTimeout if the deadline has passed."""
        self.check_abort()
        if self._remaining() <= 0:
            raise self._expired(waiting_for, bucket)

    def check_abort(self) -> None:
        """Raise SyncAborted if a member has aborted."""
        reason = self.store.get(self.abort_key)
        if reason is not None:
            raise SyncAborted(reason)

    def post_abort(self, reason: str) -> None:
        """Release all members from their waits. A later reason does not replace the first one."""
        if not self.aborted():
            self.store.put(self.abort_key, reason)

    def abort(self) -> None:
        """Leave this generation after a failure. Running operations end by themselves, at their deadline."""
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self.members.backend == "nccl":
            backend.abort()
        _ABORTED.append(backend)

    def close(self) -> None:
        """Leave a group in which no operation is running and nothing has failed."""
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None

    def late_members(self, bucket: int) -> list[str]:
        """Return the other members that have not entered the broadcast of `bucket`; if all have, those still in it."""
        others = [i for i in range(len(self.names)) if i != self.rank]
        for stage in ("entered", "left"):
            done = {i: self.store.get(self.key(stage, i)) or 0 for i in others}
            late = [self.names[i] for i in others if done[i] <= bucket]
            if late:
                return late
        return []

    def _expired(self, waiting_for: str, bucket: int | None) -> PeerTimeout:
        """Return the error of an expired wait, which names the late members of a broadcast."""
        waited = time.monotonic() - self._started
        if bucket is None:
            return PeerTimeout(f"{self.name} waited {waited:.1f} s for {waiting_for}")
        late = self.late_members(bucket)
        names = ", ".join(late) if late else "the network"
        return PeerTimeout(
            f"{self.name} waited {waited:.1f} s for {names} in bucket {bucket + 1} of {self._buckets}",
            failed_members=late,
        )

    def _broken(self, error: Exception, bucket: int | None) -> ConnectionLost | PeerTimeout:
        """Return the error to raise for a broadcast that failed with `error`."""
        if self._remaining() <= 0:
            return self._expired("a broadcast", bucket)
        where = "" if bucket is None else f" in bucket {bucket + 1} of {self._buckets}"
        late = [] if bucket is None else self.late_members(bucket)
        behind = f"; members that are behind: {', '.join(late)}" if late else ""
        return ConnectionLost(f"{self.name} lost its connection{where}: {_first_line(error)}{behind}")


class PendingBroadcast:
    """One running broadcast."""

    def __init__(self, group: Group, work: Work, tensor: torch.Tensor, bucket: int | None) -> None:
        self._group, self._work, self._tensor, self._bucket = group, work, tensor, bucket

    def wait(self, what: str = "a broadcast") -> None:
        """Wait until the tensor may be read (and, on the sender, written) again, or until an abort or the deadline.

        `what`: what is waited for, for the error.
        """
        group = self._group
        while not self._done():
            group.check(what, self._bucket)
        try:
            self._work.wait()  # it is complete: this makes the current stream wait for it, and raises its error
        except RuntimeError as error:
            raise group._broken(error, self._bucket) from error
        if self._bucket is not None:
            group.store.put(group.key("left", group.rank), self._bucket + 1)

    def _done(self) -> bool:
        """Wait at most POLL_S, and tell whether the broadcast has ended."""
        if self._group.members.backend == "nccl":
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


def names_of(members: GroupMembers, failed_members: Sequence[str]) -> list[str]:
    """Return the replicas that the given names (`engine replica 1`, `engine replica 1 worker 0`) belong to."""
    workers = {name: members.replica_of(rank) for rank, name in enumerate(members.names)}
    workers |= {f"engine {name}": index for index, name in enumerate(members.replicas)}
    found = {workers.get(name) for name in failed_members}
    return [members.replicas[index] for index in sorted(index for index in found if index is not None)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
