"""Devices of the two pools: shared by nobody, and counted within what a process was given."""

import pytest

from megarl.common.errors import RolloutError
from megarl.rollout.engine.placement import HeldDevices, refuse_overlap, refuse_split_replica, visible_devices


def test_shared_gpus_are_refused_by_name() -> None:
    trainer = [HeldDevices("trainer rank 0", "a", ("GPU-1",)), HeldDevices("trainer rank 1", "a", ("GPU-2",))]
    refuse_overlap(trainer, [HeldDevices("replica 0", "a", ("GPU-3",)), HeldDevices("replica 1", "b", ("GPU-2",))])
    with pytest.raises(RolloutError, match=r"GPU-2 on a \(by trainer rank 1 and replica 0\)"):
        refuse_overlap(trainer, [HeldDevices("replica 0", "a", ("GPU-2", "GPU-4"))])
    refuse_overlap([HeldDevices("trainer rank 0", "a", ())], [HeldDevices("replica 0", "a", ())])


def test_an_engine_never_spans_nodes() -> None:
    refuse_split_replica(8, 8)
    with pytest.raises(ValueError, match="tensor_parallel=16 does not fit into a node with 8"):
        refuse_split_replica(16, 8)


def test_device_indices_count_within_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices([4, 5]) == "4,5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6")
    assert visible_devices([1, 2]) == "3,6"
    with pytest.raises(ValueError, match="do not exist"):
        visible_devices([3])
