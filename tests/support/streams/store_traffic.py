"""The cost of a weight sync for the server of its store: the real requests of many members, against a server process.

`measure((members, buckets))` lets members take part in syncs whose broadcasts do nothing, and returns the requests and
the CPU seconds of the server per sync. Its requests are those of a sync whose only trainer rank sends: 4 per member
and 5 of the leader (`tests/weights/send/test_sender_on_ranks.py` counts those of `WeightSender.publish`). A trainer
rank that sends nothing adds 2.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from megarl.weights.group.backends import BACKENDS, BackendKind
from megarl.weights.group.stage_end import end_key
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, await_members, end_forming
from megarl.weights.send.leader import EngineCalls
from tests.support.checkout import ROOT, environment

LIMIT_S = 120.0
KEY = b"of the server's store"


@dataclass(frozen=True)
class Traffic:
    """Per sync: messages to the server, and the CPU seconds that it took."""

    requests: float
    cpu_s: float


class DoneWork:
    """A broadcast that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class NoTransfer:
    """A process group whose broadcasts do nothing."""

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> DoneWork:
        return DoneWork()

    def abort(self) -> None:
        """Nothing runs."""


NOTHING = BackendKind("cpu", on_streams=True, make=lambda store, place: NoTransfer())


def measure(*sizes: tuple[int, int], syncs: int = 3) -> list[Traffic]:
    """Return for each (members, buckets) mean requests and least CPU time of syncs of one sender and the others.

    Syncs of all sizes alternate, so that other load concerns all; it only adds CPU time. Forming groups does not count.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(BACKENDS, nothing=NOTHING))
        groups = [stack.enter_context(_formed(members, buckets)) for members, buckets in sizes]
        rounds = [[sync() for sync in groups] for _ in range(syncs)]
    return [
        Traffic(statistics.mean(each.requests for each in of), min(each.cpu_s for each in of))
        for of in zip(*rounds, strict=True)
    ]


@contextmanager
def _formed(members: int, buckets: int) -> Iterator[Callable[[], Traffic]]:
    """Form a group with a server of its own, and yield a function that makes one sync."""
    command = [sys.executable, "-m", "tests.support.streams.store_traffic"]
    pipe = subprocess.PIPE
    with (
        ThreadPoolExecutor(members) as threads,
        subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=pipe, stdin=pipe) as server,
    ):
        try:
            assert server.stdout is not None
            yield _Syncs(server, int(server.stdout.readline()), members, buckets, threads).sync
        finally:
            server.kill()


class _Syncs:
    """The members of one group, which are threads, and its leader."""

    def __init__(
        self, server: subprocess.Popen[bytes], port: int, members: int, buckets: int, threads: ThreadPoolExecutor
    ) -> None:
        self._server, self._members, self._buckets, self._threads = server, members, buckets, threads
        self._number = 0
        replicas = tuple(f"replica {number}" for number in range(members - 1))
        group_members = GroupMembers(0, (0,), replicas, (1,) * (members - 1), "nothing", LIMIT_S)
        # Together, because torch looks up the name of the address of each connection.
        stores = threads.map(lambda _: SyncStore("127.0.0.1", port, KEY), range(members))
        self._groups = [Group(store, group_members, rank) for rank, store in enumerate(stores)]
        self._leader = leader = SyncStore("127.0.0.1", port, KEY)
        self._calls = EngineCalls(_NoEngines(), leader, 1, LIMIT_S, recompute_kv=True)
        joined = [threads.submit(group.join, LIMIT_S) for group in self._groups]
        await_members(leader, group_members, LIMIT_S)
        for each in joined:
            each.result(LIMIT_S)
        end_forming(leader, 0, None)

    def sync(self) -> Traffic:
        groups, leader, number = self._groups, self._leader, self._number
        self._number += 1
        connections = [leader, *(c for group in groups for c in (group.store, group._connection) if c is not None)]
        before, cpu = sum(each.requests for each in connections), self._cpu_s()
        list(self._threads.map(lambda group: _take_part(group, number, self._buckets), groups))
        keys = [groups[0].key("report", rank) for rank in range(self._members)]
        reports = leader.block_all(keys, LIMIT_S)
        assert reports is not None and len(reports) == self._members
        leader.put_once(end_key(groups[0].stage), {"status": "published"})
        self._calls.forget(groups[0], groups[0].stage)
        leader.drop(end_key(f"g0/s{number - 3}"))
        assert all(group.wait_end(LIMIT_S) == {"status": "published"} for group in groups)
        return Traffic(sum(each.requests for each in connections) - before, self._cpu_s() - cpu)

    def _cpu_s(self) -> float:
        """Ask the server for its CPU time: it reads a clock of microseconds, the system's counters tick in 10 ms."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(b"\n")
        self._server.stdin.flush()
        return float(self._server.stdout.readline())


def _take_part(group: Group, sync: int, buckets: int) -> None:
    """Do what receiver.py and sync_attempt.py do: broadcasts, and one report."""
    group.begin(sync, buckets, LIMIT_S)
    for bucket in range(buckets):
        group.broadcast(torch.empty(0), 0, bucket).wait()
    report = {"member": group.name, "failure": None, "digests": [2**62] * buckets}
    group.store.put(group.key("report", group.rank), report)
    group.progress.mark_done()


class _NoEngines:
    def replicas(self) -> list[object]:
        return []

    def names(self) -> list[str]:
        return []

    def restart(self, names: object, timeout_s: float) -> None:
        raise NotImplementedError


def main() -> None:
    """Serve a store until the process is killed, or its parent ends. Answer each line with the CPU seconds so far."""
    store = SyncStore("127.0.0.1", 0, KEY, server=True)
    print(store.port, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
