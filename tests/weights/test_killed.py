"""A receiver that is killed, or stopped, in mid-sync: named within the deadline, everybody released."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any

import pytest
import torch

from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.sender import WeightSender
from tests.support.checkout import ROOT, environment
from tests.support.engines.fake_engines import TRANSPORT, FakePool, FakeReplica, ListExporter

pytestmark = pytest.mark.slow


# A process that is stopped is found by the deadline alone, which is therefore short; one that is killed, before it.
DEADLINES_S = {signal.SIGKILL: 60.0, signal.SIGSTOP: 4.0}
RPC_S = 60.0


class ProcessReplica:
    """A FakeReplica in a process of its own, which can be killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        listener = Listener(("127.0.0.1", 0), authkey=b"test")
        listener._listener._socket.settimeout(120.0)  # type: ignore[attr-defined]
        command = [sys.executable, "-m", "tests.support.engines.replica_process", str(listener.address[1]), name]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment())
        self._connection: Connection = listener.accept()
        listener.close()
        self._lock = threading.Lock()

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        with self._lock:
            try:
                self._connection.send((method, args))
                answered = self._connection.poll(timeout_s)
                ok, value = self._connection.recv() if answered else (False, None)
            except (EOFError, OSError) as error:
                raise ConnectionError(f"{self.name}'s process died") from error
        if not answered:
            raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.0f} s")
        if not ok:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)


class MixedPool(FakePool):
    def __init__(self, victim: ProcessReplica) -> None:
        super().__init__(1)
        self._replicas: list[Any] = [FakeReplica("replica 0"), victim]


@pytest.fixture
def victim() -> Iterator[ProcessReplica]:
    replica = ProcessReplica("replica 1")
    yield replica
    replica.process.send_signal(signal.SIGCONT)
    replica.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_lost_in_mid_sync_costs_the_other_one_only_time(
    victim: ProcessReplica, end: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """The survivor takes everything again in a group without the lost one: at once if that is dead, or else after the
    deadline of the sync, which alone tells that it hangs, and which the repeat logs."""
    pool = MixedPool(victim)
    exporter = ListExporter({f"t{i}": torch.randn(1 << 20) for i in range(24)})
    settings = SyncSettings(bucket_bytes=2**23, sync_s=DEADLINES_S[end], rpc_s=RPC_S, restarts=1, transport=TRANSPORT)
    sender = WeightSender(settings, exporter)
    sender.connect(pool)
    sender.publish(0)
    survivor = pool.replicas()[0]
    loaded = survivor.loaders[0].loads

    def end_the_victim(load: int) -> None:
        if load == loaded + 5:
            victim.process.send_signal(end)

    survivor.loaders[0].before_load = end_the_victim
    exporter.tensors = {name: tensor + 1 for name, tensor in exporter.tensors.items()}
    caplog.clear()
    report = sender.publish(1)
    (repeated,) = [each.getMessage() for each in caplog.records if "repeating the sync" in each.getMessage()]
    waited = re.search(r"waited (\d+\.\d) s for engine replica 1 worker 0 in the broadcast", repeated)
    if end == signal.SIGKILL:
        assert "waited" not in repeated, "a closed connection is noticed before the deadline"
    else:
        assert waited is not None, repeated
    assert report.restarted == ("replica 1",) and pool.names() == ["replica 0"] and pool.restarted == []
    assert pool.replicas() == [survivor] and survivor.serving and survivor.version == "1"
    assert survivor.calls.count("abandon_weight_update") == 1
    received = survivor.loaders[0].tensors
    assert all(torch.equal(received[name], tensor) for name, tensor in exporter.tensors.items())
