"""Many publications: the store of the weight sync keeps no key of those that are over."""

import threading

import psutil
import pytest

from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send.sender import WeightSender
from tests.support.engines.fake_engines import TRANSPORT, FakePool, ListExporter, random_tensors
from tests.support.measures.growth import in_own_process, slopes_over

pytestmark = pytest.mark.slow

SETTINGS = SyncSettings(bucket_bytes=65536, sync_s=30.0, rpc_s=10.0, restart_s=10.0, restarts=0, transport=TRANSPORT)

THREAD_ENDS_S = 60.0
LASTING = ("MainThread", "ThreadPoolExecutor-", "weight-relay")  # a pool keeps its threads, and a group its own


def join_threads() -> None:
    """Let the threads of calls and watches end whose answers have come: they may need a moment after it."""
    for each in threading.enumerate():
        if not each.name.startswith(LASTING):
            each.join(THREAD_ENDS_S)


def slopes_of_publications(syncs: int) -> dict[str, float]:
    pool = FakePool(1, 1)
    sender = WeightSender(SETTINGS, ListExporter(random_tensors()))
    sender.connect(pool)

    def sizes() -> dict[str, float]:
        join_threads()
        return {
            "keys": sender.store._store.num_keys(),
            "threads": threading.active_count(),
            "descriptors": psutil.Process().num_fds(),
        }

    def publish(version: int) -> None:
        sender.publish(version)
        for replica in pool.replicas():
            replica.calls.clear()

    slopes = slopes_over(syncs, 10, publish, sizes)
    sender.close()
    return slopes


@pytest.mark.parametrize("syncs", [20_000])
def test_the_keys_of_publications_are_deleted(syncs: int) -> None:
    slopes = in_own_process(slopes_of_publications, syncs)
    assert all(slope < 1 / syncs for slope in slopes.values()), slopes
