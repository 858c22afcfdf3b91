"""Errors that cross process borders."""

import pickle

from megarl.common.errors import ReplicaFailed


def test_replica_failures_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ReplicaFailed(4, "replica 4 died")))
    assert (error.replica, str(error)) == (4, "replica 4 died")
