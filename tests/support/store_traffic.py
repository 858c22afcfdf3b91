"""What a weight sync costs the server of its store: the real requests of many members, against a server process.

`measure(members)` lets `members` engine workers take part in syncs whose broadcasts do nothing, and returns the
requests and the CPU seconds of the server per sync.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from megarl.weights.backends import BACKENDS, BackendKind
from megarl.weights.replica_calls import EngineCalls
from megarl.weights.store import SyncStore
from megarl.weights.transport import Group, GroupMembers, await_members, end_forming
from megarl.weights.watch import end_key
from tests.support.checkout import ROOT, environment

LIMIT_S = 120.0


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


def measure(members: int, syncs: int = 3, buckets: int = 50) -> Traffic:
    """The mean over `syncs` syncs of one sender and `members` - 1 workers; forming the group does not count."""
    BACKENDS["nothing"] = BackendKind("cpu", on_streams=True, make=lambda store, place: NoTransfer())
    command = [sys.executable, "-m", "tests.support.store_traffic"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=pipe, stdin=pipe) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            return _measure(port, psutil.Process(server.pid), members, syncs, buckets)
        finally:
            server.kill()
            del BACKENDS["nothing"]


def _measure(port: int, server: psutil.Process, members: int, syncs: int, buckets: int) -> Traffic:
    replicas = tuple(f"replica {number}" for number in range(members - 1))
    group_members = GroupMembers(0, (0,), replicas, (1,) * (members - 1), "nothing", LIMIT_S)
    groups = [Group(SyncStore("127.0.0.1", port), group_members, rank) for rank in range(members)]
    leader = SyncStore("127.0.0.1", port)
    calls = EngineCalls(_NoEngines(), leader, 1, LIMIT_S, recompute_kv=True)
    with ThreadPoolExecutor(members) as threads:
        joined = [threads.submit(group.join, LIMIT_S) for group in groups]
        await_members(leader, group_members, LIMIT_S)
        for each in joined:
            each.result(LIMIT_S)
        end_forming(leader, 0, None)
        connections = [leader, *(c for group in groups for c in (group.store, group._connection) if c is not None)]
        before, cpu = sum(each.requests for each in connections), _cpu_s(server)
        for sync in range(syncs):
            list(threads.map(lambda group, sync=sync: _take_part(group, sync, buckets), groups))
            keys = [groups[0].key("report", rank) for rank in range(members)]
            reports = leader.block_all(keys, LIMIT_S)
            assert reports is not None and len(reports) == members
            leader.put_once(end_key(groups[0].stage), {"status": "published"})
            calls.forget(groups[0], groups[0].stage)
            assert all(group.wait_end(LIMIT_S) == {"status": "published"} for group in groups)
    requests = sum(each.requests for each in connections) - before
    return Traffic(requests / syncs, (_cpu_s(server) - cpu) / syncs)


def _take_part(group: Group, sync: int, buckets: int) -> None:
    """As receiver.py and sending.py do: broadcasts, and one report."""
    group.begin(sync, buckets, LIMIT_S)
    for bucket in range(buckets):
        group.broadcast(torch.empty(0), 0, bucket).wait()
    report = {"member": group.name, "failure": None, "digests": [2**62] * buckets}
    group.store.put(group.key("report", group.rank), report)
    group.progress.finish()


class _NoEngines:
    def replicas(self) -> list[object]:
        return []

    def restart(self, names: object, timeout_s: float) -> None:
        raise NotImplementedError


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Serve a store until the process is killed, or its parent ends."""
    store = SyncStore("127.0.0.1", 0, server=True)
    print(store.port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
