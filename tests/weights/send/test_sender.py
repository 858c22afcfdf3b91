"""The whole protocol in one process: a sending trainer rank and fake engines with the real receiver."""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.common.errors import WeightSyncError
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema.job import RayConfig
from megarl.weights.group import store
from megarl.weights.group.store import store_address
from megarl.weights.group.transport import Group
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import RELOAD_LAYER_SPAN, Bucket, bucket_plan, schedule
from megarl.weights.plan.settings import SyncSettings
from megarl.weights.send import failure, leader
from megarl.weights.send.failure import FailureCause
from megarl.weights.send.leader import EngineCalls
from megarl.weights.send.sender import WeightSender
from megarl.weights.send.sync_attempt import SyncAttempt
from tests.support.engines.fake_engines import (
    TRANSPORT,
    FakePool,
    FakeReplica,
    ListExporter,
    ListGather,
    random_tensors,
)
from tests.support.trainer.configs import config

SETTINGS = SyncSettings(bucket_bytes=8192, sync_s=30.0, rpc_s=10.0, restart_s=10.0, restarts=0, transport=TRANSPORT)


def make_sender(pool: FakePool, settings: SyncSettings = SETTINGS) -> tuple[WeightSender, ListExporter]:
    exporter = ListExporter(random_tensors())
    sender = WeightSender(settings, exporter)
    sender.connect(pool)
    return sender, exporter


def with_settings(**changes: float | int | bool) -> SyncSettings:
    return SyncSettings(**{**SETTINGS.__dict__, **changes})


def assert_received(pool: FakePool, tensors: dict[str, torch.Tensor]) -> None:
    for replica in pool.replicas():
        for loader in replica.loaders:
            assert list(loader.tensors) == list(tensors), "names, in the manifest's order"
            for name, tensor in tensors.items():
                received = loader.tensors[name]
                assert received.dtype == tensor.dtype and torch.equal(received, tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_worker_receives_every_bit_and_versions_advance(dtype: torch.dtype) -> None:
    pool = FakePool(1, 2)
    exporter = ListExporter(random_tensors(dtype=dtype))
    sender = WeightSender(SETTINGS, exporter)
    sender.connect(pool)
    for version in range(3):
        exporter.tensors = random_tensors(seed=version, dtype=dtype)
        report = sender.publish(version)
        assert_received(pool, exporter.tensors)
        assert report.version == version and report.buckets == len(sender.plan.buckets) > 5
        assert report.bytes == sum(t.nbytes for t in exporter.tensors.values())
        assert [replica.version for replica in pool.replicas()] == [str(version)] * 2
        assert all(replica.serving for replica in pool.replicas())
    session = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
    assert pool.replicas()[0].calls == ["world_size", "init_weight_transfer", *session * 3]


def test_replicas_that_join_and_leave_change_the_group_at_the_next_sync_only() -> None:
    """A new one gets every bit; one that was removed is not called any more, and may be dead."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool)
    sender.publish(0)
    formed = sender._generation
    sender.publish(1)
    assert sender._generation == formed, "the group was formed again although nothing had changed"
    new = pool.add("replica 2", workers=2)
    exporter.tensors = random_tensors(seed=1)
    sender.publish(2)
    assert [replica.version for replica in pool.replicas()] == ["2"] * 3
    assert all(torch.equal(loader.tensors["head"], exporter.tensors["head"]) for loader in new.loaders)
    gone = pool.remove("replica 0")
    gone.failed, calls = "its engine has ended", len(gone.calls)
    pool.remove("replica 2")
    sender.publish(3)
    assert_received(pool, exporter.tensors)
    assert len(gone.calls) == calls and [replica.version for replica in pool.replicas()] == ["3"]
    assert sender._generation == formed + 2 and pool.restarted == []


def test_a_new_replica_that_fails_to_join_the_group_is_restarted_and_a_second_failure_is_an_error() -> None:
    pool = FakePool(1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    pool.add("replica 1").failed = "it has died since it was started"
    sender.publish(1)
    assert pool.restarted == ["replica 1"] and [replica.version for replica in pool.replicas()] == ["1", "1"]
    assert_received(pool, exporter.tensors)
    pool.add("replica 2").failed, pool.can_restart = "it has died since it was started", False
    with pytest.raises(WeightSyncError, match="no GPU is free"):
        sender.publish(2)


def test_a_group_that_is_not_formed_is_left_although_this_rank_has_joined_it(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, abort, left = EngineCalls.connect, Group.abort, list[tuple[str, bool]]()

    def connect_in_vain(*arguments: Any) -> None:
        connect(*arguments)
        raise WeightSyncError("an engine did not answer")

    def noted(group: Group) -> None:
        left.append((group.name, group._backend is not None))
        abort(group)

    monkeypatch.setattr(EngineCalls, "connect", connect_in_vain)
    monkeypatch.setattr(Group, "abort", noted)
    with pytest.raises(WeightSyncError, match="an engine did not answer"):
        make_sender(FakePool(1))
    assert left == [("trainer rank 0", True)]


def test_all_replicas_that_have_ended_are_restarted_at_once_although_one_is_known_first() -> None:
    """All of them end with the controller that has started them in place of others."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    pool.add("replica 2")

    def end_later() -> None:
        time.sleep(0.3)
        raise RuntimeError("it has ended")

    pool.replicas()[0].failed = "it has ended"
    pool.replicas()[1].on["world_size"] = end_later
    exporter.tensors = random_tensors(seed=1)
    formed = sender._generation
    report = sender.publish(1)
    assert sender._generation == formed + 2
    assert pool.restarted == ["replica 0", "replica 1"] == list(report.restarted), "each start of an engine is counted"
    assert [replica.version for replica in pool.replicas()] == ["1"] * 3
    assert_received(pool, exporter.tensors)


def test_a_replica_that_only_answers_late_alongside_one_that_has_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    pool.add("replica 2").failed = "it has ended"
    late = pool.replicas()[1]

    def answer_late() -> None:
        del late.on["world_size"]
        time.sleep(0.6)

    late.on["world_size"] = answer_late
    monkeypatch.setattr(leader, "EXTRA_WAIT_S", 0.2)
    sender.publish(1)
    assert pool.restarted == ["replica 2"] and pool.replicas()[1] is late
    assert_received(pool, exporter.tensors)


def test_a_replica_that_ends_while_the_group_is_formed_for_another_attempt_is_restarted_too() -> None:
    pool = FakePool(1, 1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    break_replica(pool.replicas()[1], "load")
    pool.replicas()[2].on["world_size"] = die
    exporter.tensors = random_tensors(seed=5)
    report = sender.publish(1)
    assert report.restarted == ("replica 1", "replica 2")
    assert pool.replaced_later == ["replica 1"] and pool.restarted == ["replica 2"]
    assert [(replica.name, replica.version) for replica in pool.replicas()] == [("replica 0", "1"), ("replica 2", "1")]
    assert_received(pool, exporter.tensors)


def test_a_replica_that_fails_again_after_its_restart_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(1, 1)
    sender, _ = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    pool.add("replica 2").failed = "it has died since it was started"
    restart = pool.restart

    def in_vain(names: Sequence[str], timeout_s: float) -> None:
        restart(names, timeout_s)
        pool.replicas()[-1].failed = "it has died again"

    monkeypatch.setattr(pool, "restart", in_vain)
    with pytest.raises(WeightSyncError, match="it has died again"):
        sender.publish(1)
    assert pool.restarted == ["replica 2"]


def test_a_pool_that_does_not_answer_before_a_sync_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(1)
    sender, _ = make_sender(pool)

    def names() -> list[str]:
        raise RuntimeError("the rollout controller died")

    monkeypatch.setattr(pool, "names", names)
    with pytest.raises(WeightSyncError, match="could not ask the pool for its replicas: the rollout controller died"):
        sender.publish(0)


def test_a_failure_of_the_sender_itself_is_raised_even_if_the_version_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails after its report, so that the leader finds nothing wrong. The next sync forms the group again."""
    pool = FakePool(1)
    sender, exporter = make_sender(pool)

    def run(attempt: SyncAttempt, of_library: Callable[[SyncAttempt], None] = SyncAttempt.run) -> None:
        of_library(attempt)
        raise MemoryError("a test says so")

    with monkeypatch.context() as patched:
        patched.setattr(SyncAttempt, "run", run)
        with pytest.raises(MemoryError, match="a test says so"):
            sender.publish(0)
    sender.publish(1)
    assert_received(pool, exporter.tensors)


FROZEN = ("embed", "layers.2.q", "layers.5.scalar")  # the first one is larger than a bucket


def publish_new(sender: WeightSender, exporter: ListExporter, version: int) -> int:
    """Publish other weights, those of FROZEN included, so that it shows whether they are sent; return the bytes."""
    exporter.tensors = random_tensors(seed=version)
    return sender.publish(version).bytes


def assert_have(replica: FakeReplica, changed: int, frozen: int) -> None:
    """A replica has the tensors of one version, and those of FROZEN of another one."""
    new, old = random_tensors(seed=changed), random_tensors(seed=frozen)
    for loader in replica.loaders:
        assert all(torch.equal(loader.tensors[n], (old if n in FROZEN else new)[n]) for n in new)


def test_a_group_gets_what_never_changes_once() -> None:
    """All members of a new group get all again: one of them may have nothing, or a mixture of versions."""
    pool, exporter = FakePool(1, 2), ListExporter(random_tensors())
    sender = WeightSender(with_settings(restarts=1), exporter, frozen=FROZEN)
    sender.connect(pool)
    whole = publish_new(sender, exporter, 0)
    frozen = sum(exporter.tensors[name].nbytes for name in FROZEN)
    assert [publish_new(sender, exporter, version) for version in (1, 2)] == [whole - frozen] * 2
    for replica in pool.replicas():
        assert_have(replica, 2, 0)
    new = pool.add("replica 2")
    assert [publish_new(sender, exporter, version) for version in (3, 4)] == [whole, whole - frozen]
    for replica in pool.replicas():
        assert_have(replica, 4, 3)
    new.on["finish_weight_update"] = die
    assert publish_new(sender, exporter, 5) == whole and pool.replaced_later == ["replica 2"]
    for replica in pool.replicas():
        assert_have(replica, 5, 5)


def test_engines_that_reload_or_sleep_get_all_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, exporter = FakePool(1), ListExporter(random_tensors())
    pool._replicas[0] = FakeReplica("replica 0", 1, "its weights are packed")
    sender = WeightSender(SETTINGS, exporter, frozen=FROZEN)
    sender.connect(pool)
    assert publish_new(sender, exporter, 0) == publish_new(sender, exporter, 1)
    assert_have(pool.replicas()[0], 1, 1)
    pool = FakePool(1)
    monkeypatch.setattr(FakeReplica, "_wake", lambda replica, what: None, raising=False)
    sender = WeightSender(with_settings(asleep=True), exporter, frozen=FROZEN)
    sender.connect(pool)
    assert publish_new(sender, exporter, 0) == publish_new(sender, exporter, 1)
    assert_have(pool.replicas()[0], 1, 1)


def test_a_worker_that_lacks_what_a_sync_leaves_out_refuses_it() -> None:
    pool, exporter = FakePool(1, 2), ListExporter(random_tensors())
    sender = WeightSender(SETTINGS, exporter, frozen=FROZEN)
    sender.connect(pool)
    sender.publish(0)
    pool.replicas()[1]._receivers[0].has_all = False
    with pytest.raises(WeightSyncError, match="leaves out tensors that engine replica 1 worker 0 has not got yet: 3"):
        sender.publish(1)
    assert [replica.version for replica in pool.replicas()] == ["0", "0"]


@pytest.mark.parametrize(("obstacle", "span"), [(None, None), ("its weights are packed", RELOAD_LAYER_SPAN)])
def test_buckets_mix_layers_if_every_worker_loads_in_place(obstacle: str | None, span: int | None) -> None:
    pool = FakePool(1, 2)
    pool._replicas[1] = FakeReplica("replica 1", 2, obstacle)
    sender, exporter = make_sender(pool)
    sender.publish(0)
    assert sender.plan.layer_span == span
    for replica in pool.replicas():
        assert [receiver.plan.hash for receiver in replica._receivers] == [sender.plan.hash] * len(replica.loaders)
    assert_received(pool, exporter.tensors)


def test_the_leader_logs_in_which_ways_the_engines_load_when_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    """No engine worker has a log of its own that a user finds."""
    caplog.set_level(logging.INFO, leader.__name__)
    pool = FakePool(1, 2)
    sender, _ = make_sender(pool)
    sender.publish(0)
    sender.publish(1)
    pool.replicas()[1].loaders[1].report = "layer-wise reload: a test says so"
    sender.publish(2)
    sender.publish(3)
    assert [record.getMessage() for record in caplog.records if record.name == leader.__name__] == [
        "weights of version 0: copies (all 3 engine workers)",
        "weights of version 2: copies (engine replica 0 worker 0, engine replica 1 worker 0); "
        "layer-wise reload: a test says so (engine replica 1 worker 1)",
    ]


def test_a_worker_that_cannot_load_in_place_any_more_refuses_the_sync() -> None:
    pool = FakePool(1, 2)
    sender, _ = make_sender(pool)
    sender.publish(0)
    loader = pool.replicas()[1].loaders[0]
    loaded, loader.obstacle = loader.loads, "a test says so"
    message = (
        r"engine replica 1 worker 0: the plan of this sync mixes .* engine replica 1 worker 0 cannot: a test says so"
    )
    with pytest.raises(WeightSyncError, match=message) as info:
        sender.publish(1)
    assert info.value.failed_members == ("engine replica 1 worker 0",) and loader.loads == loaded
    assert [replica.version for replica in pool.replicas()] == ["0", "0"]


def test_a_worker_that_follows_another_plan_refuses_the_sync() -> None:
    """Its buckets have the same bytes with the same digests, but under the names of other tensors."""
    pool = FakePool(1, 2)
    tensors = {name: torch.full((64, 64), float(number)) for number, name in enumerate(("a", "b", "c"))}
    sender = WeightSender(SETTINGS, ListExporter(tensors))
    sender.connect(pool)
    sender.publish(0)
    receiver = pool.replicas()[1]._receivers[0]
    names = {"a": "b", "b": "a", "c": "c"}
    specs = [replace(spec, name=names[spec.name]) for spec in receiver.plan.specs]
    receiver.plan = bucket_plan(specs, receiver.plan.bucket_bytes, receiver.plan.layer_span)
    with pytest.raises(WeightSyncError, match=r"this sync follows plan \w+, engine replica 1 worker 0 has \w+"):
        sender.publish(1)
    assert [replica.version for replica in pool.replicas()] == ["0", "0"]
    assert torch.equal(pool.replicas()[1].loaders[0].tensors["b"], tensors["b"])


def flip_bit(index: int, payload: torch.Tensor) -> None:
    if index == 4:
        payload[123] ^= 16


def test_a_corrupt_bucket_is_found_and_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(1, 1)
    sender, _ = make_sender(pool)
    sender.publish(0)
    loads = pool.replicas()[0].loaders[0].loads
    seal = BucketPacker.seal

    def sealed(self: BucketPacker, bucket: Bucket, version: int) -> int:
        value = seal(self, bucket, version)
        flip_bit(bucket.index, self.wire(bucket)[: bucket.nbytes])  # on its way to the wire
        return value

    monkeypatch.setattr(BucketPacker, "seal", sealed)
    with pytest.raises(WeightSyncError, match=r"version 1 failed.*bucket 5 of version 1 .*digest") as info:
        sender.publish(1)
    # A worker that finds it after another one has ended the sync is known by its replica's failed call.
    failed = {name.removesuffix(" worker 0") for name in info.value.failed_members}
    assert failed <= {"engine replica 0", "engine replica 1"}
    assert info.value.failed_members and info.value.needs_restart == ("replica 0", "replica 1")
    for replica in pool.replicas():
        assert replica.version == "0" and not replica.serving and replica.failed is not None
        assert "resume" not in replica.calls[replica.calls.index("resume") + 1 :]
        assert replica.loaders[0].loads - loads <= 4, "the corrupt bucket must not be loaded"


@pytest.mark.parametrize("place", [0, -1])
def test_the_first_and_the_last_bucket_are_checked_too(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    pool = FakePool(1)
    sender, exporter = make_sender(pool)
    sender.publish(0)
    receiver = pool.replicas()[0]._receivers[0]
    chosen = receiver.plan.buckets[place].index
    check = receiver._check

    def corrupted(buffer_B: torch.Tensor, bucket: Bucket, version: int) -> int:
        if bucket.index == chosen:
            buffer_B[0] ^= 1
        return check(buffer_B, bucket, version)

    monkeypatch.setattr(receiver, "_check", corrupted)
    exporter.tensors = random_tensors(seed=1)
    with pytest.raises(WeightSyncError, match=rf"worker 0: bucket {chosen + 1} of version 1 .*digest"):
        sender.publish(1)


def test_the_replica_that_received_a_corrupt_bucket_is_named_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket leaves the sender intact; the memory or the network of one receiver changes it."""
    pool = FakePool(1, 2, 1)
    sender, exporter = make_sender(pool)
    sender.publish(0)
    victim = pool.replicas()[1]._receivers[1]
    check = victim._check

    def corrupted(buffer_B: torch.Tensor, bucket: Bucket, version: int) -> int:
        flip_bit(bucket.index, buffer_B[: bucket.nbytes])
        return check(buffer_B, bucket, version)

    monkeypatch.setattr(victim, "_check", corrupted)
    exporter.tensors = random_tensors(seed=1)
    with pytest.raises(WeightSyncError, match=r"engine replica 1 worker 1: bucket 5 of version 1 .*digest") as info:
        sender.publish(1)
    assert info.value.failed_members == ("engine replica 1 worker 1",)
    assert [replica.version for replica in pool.replicas()] == ["0", "0", "0"]


def test_the_pause_is_measured_from_the_first_call_to_the_last_resume() -> None:
    """Replica 1 pauses late and replica 0 resumes late. What comes before and after is no pause."""
    pool = FakePool(1, 1)
    sender, _ = make_sender(pool)
    pool.replicas()[1].on["pause"] = lambda: time.sleep(0.3)
    pool.replicas()[0].on["resume"] = lambda: time.sleep(0.3)
    report = sender.publish(0)
    assert 0.6 <= report.pause_seconds <= report.seconds
    pool.replicas()[0].on["pause"] = lambda: time.sleep(0.3)  # each may have stopped before its call returns
    report = sender.publish(1)
    assert 0.6 <= report.pause_seconds <= report.seconds


def test_the_engines_generate_while_the_first_bucket_is_gathered() -> None:
    """A gather takes 0.05 s per tensor. The engines are paused for those that come after the first broadcast only."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool)
    serving: list[bool] = []

    def gather_slowly(tensor: int) -> None:
        serving.append(all(replica.serving for replica in pool.replicas()))
        time.sleep(0.05)

    exporter.before_copy = gather_slowly
    report = sender.publish(0)
    assert_received(pool, exporter.tensors)
    buckets = sender.plan.buckets
    staged = len(buckets[0].pieces)
    assert len(buckets) > 5 and len(serving) == sum(len(bucket.pieces) for bucket in buckets) > 30
    assert all(serving[:staged]) and report.phases["stage"] >= 0.05 * staged
    assert not any(serving[-5:]) and report.pause_seconds > 0.05 * 5


def test_the_exporter_is_told_the_order_of_the_gathers() -> None:
    """A rank sends from the same memory in each second gather of the exporter's list, so the order must be that one."""
    exporter = ListExporter(random_tensors(), 0, lambda name: 1 if name > "layers.2" else 0)
    sender = WeightSender(SETTINGS, exporter)
    sender.plan = bucket_plan(exporter.manifest(), 8192, None)
    with patch.object(exporter, "gathers", wraps=exporter.gathers) as gathers:
        sender._lay_out_buckets(None)
    reported = [request.rows for request in gathers.call_args.args[0]]
    order = [each.bucket for each in schedule(sender.plan) if each.kind == "gather"]
    assert order != sorted(order, key=lambda bucket: bucket.index)
    assert [[rows.tensor for rows in each] for each in reported] == [[p.tensor for p in b.pieces] for b in order]
    for bucket, gather in zip(sender.plan.buckets, sender._gathers, strict=True):
        assert (gather is None) == (bucket.owner == 1)
        if isinstance(gather, ListGather):
            assert [rows.tensor for rows in gather._request.rows] == [piece.tensor for piece in bucket.pieces]


def assert_untouched(pool: FakePool) -> None:
    """The last sync has called no replica: all serve version 0."""
    for replica in pool.replicas():
        assert replica.calls[-1] == "resume" and replica.calls.count("pause") == 1
        assert replica.serving and replica.failed is None and replica.version == "0"


def test_a_gather_that_fails_while_it_is_staged_leaves_all_engines_serving() -> None:
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)

    def broken(tensor: int) -> None:
        raise RuntimeError("a gather failed")

    exporter.before_copy = broken
    with pytest.raises(RuntimeError, match="a gather failed"):
        sender.publish(1)
    assert_untouched(pool)
    exporter.before_copy = lambda tensor: None
    sender.publish(1)
    assert not pool.restarted and [replica.version for replica in pool.replicas()] == ["1", "1"]


def test_a_leader_that_stages_for_too_long_ends_the_sync_and_calls_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "EXTRA_WAIT_S", 0.5)
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool)
    sender.publish(0)
    sender.settings = with_settings(sync_s=1.0)
    pauses = iter([3.0])  # of the first copy only
    exporter.before_copy = lambda tensor: time.sleep(next(pauses, 0.0))
    with pytest.raises(WeightSyncError, match=r"during stage: .*rank 0 waited 1\.5 s for its own first") as info:
        sender.publish(1)
    assert info.value.needs_restart == ()
    assert_untouched(pool)


def test_digests_are_compared_again_before_the_version_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that checks nothing is still found out, by the leader."""
    pool = FakePool(1, 1)
    sender, _ = make_sender(pool)
    victim = pool.replicas()[1]._receivers[0]
    check = victim._check
    monkeypatch.setattr(victim, "_check", lambda *args: check(*args) ^ (args[1].index == 2))
    with pytest.raises(WeightSyncError, match=r"engine replica 1 worker 0 has other digests.*\[3\]") as info:
        sender.publish(0)
    assert info.value.failed_members == ("engine replica 1 worker 0",)
    assert [replica.version for replica in pool.replicas()] == [None, None]


def test_an_engine_that_fails_to_load_is_named_and_releases_all() -> None:
    pool = FakePool(1, 2)
    sender, _ = make_sender(pool)

    def explode(load: int) -> None:
        if load == 3:
            raise ValueError("no such parameter")

    pool.replicas()[1].loaders[1].before_load = explode
    with pytest.raises(WeightSyncError, match="engine replica 1 worker 1: no such parameter") as info:
        sender.publish(0)
    assert info.value.failed_members == ("engine replica 1 worker 1",)


def test_a_silent_engine_is_named_within_the_deadline() -> None:
    """It neither loads nor answers: the deadline ends the wait and says who waited for whom, where."""
    pool = FakePool(1, 1)
    # Large buckets, so that a socket's buffers cannot swallow the rest of the sync.
    sender = WeightSender(
        with_settings(sync_s=4.0, bucket_bytes=2**23),
        ListExporter({f"t{i}": torch.randn(1 << 20) for i in range(12)}),
    )
    sender.connect(pool)
    release = threading.Event()
    pool.replicas()[1].loaders[0].before_load = lambda load: load == 2 and release.wait(300)  # type: ignore[assignment]
    with pytest.raises(WeightSyncError) as info:
        sender.publish(0)
    release.set()
    message = str(info.value)
    found = re.search(
        r"trainer rank 0 waited (\d+\.\d) s for engine replica 1 worker 0 in the broadcast of bucket \d+", message
    )
    assert found is not None, message
    assert "engine replica 1 worker 0: works after bucket 3 of 12" in message
    assert info.value.failed_members == ("engine replica 1 worker 0",)


def test_a_replica_that_cannot_pause_leaves_the_others_serving() -> None:
    pool = FakePool(1, 1)
    sender, _ = make_sender(pool)

    def die() -> None:
        raise ConnectionError("the actor died")

    pool.replicas()[0].on["pause"] = die
    with pytest.raises(WeightSyncError, match="during pause") as info:
        sender.publish(0)
    assert info.value.needs_restart == ("replica 0",)
    assert pool.replicas()[1].serving and pool.replicas()[1].failed is None


def test_the_trainer_failing_releases_the_engines() -> None:
    """At once: the time limit of the sync is longer than that of the test."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(sync_s=3600.0))

    def broken(number: int) -> None:
        if number == 9:
            raise RuntimeError("a gather failed")

    exporter.before_copy = broken
    with pytest.raises(RuntimeError, match="a gather failed"):
        sender.publish(0)
    assert all(replica.version is None and not replica.serving for replica in pool.replicas())


def die(_: int = 0) -> None:
    raise ConnectionError("the actor died")


def break_replica(replica: FakeReplica, where: str) -> None:
    """Make every later sync fail at one of its loads, or in one of its calls."""
    if where == "load":
        replica.loaders[0].before_load = lambda load: die() if load % 10 == 5 else None
    else:
        replica.on[where] = die


@pytest.mark.parametrize("where", ["load", "start_weight_update", "update_weights", "finish_weight_update"])
def test_a_replica_that_fails_in_a_sync_is_replaced_later_and_the_others_take_all_weights_again(where: str) -> None:
    """The others are not replaced, and stay paused until they have loaded everything; a new one joins afterwards."""
    pool = FakePool(1, 1, 2)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    survivors = [pool.replicas()[0], pool.replicas()[2]]
    break_replica(pool.replicas()[1], where)
    calls = [len(survivor.calls) for survivor in survivors]
    exporter.tensors = random_tensors(seed=5)
    report = sender.publish(1)
    assert report.restarted == ("replica 1",)
    assert (pool.replaced_later, pool.restarted) == (["replica 1"], [])
    assert pool.replicas() == survivors
    assert_received(pool, exporter.tensors)
    for survivor, before in zip(survivors, calls, strict=True):
        later = survivor.calls[before:]
        assert later.index("abandon_weight_update") < later.index("init_weight_transfer") < later.index("resume")
        assert later.count("resume") == 1 and later[-1] == "resume" and later.count("update_weights") >= 1
        assert survivor.serving and survivor.version == "1" and survivor.failed is None
    pool.add("replica 3")
    sender.publish(2)
    assert [replica.version for replica in pool.replicas()] == ["2"] * 3
    assert_received(pool, exporter.tensors)


def test_a_replica_that_cannot_give_up_an_interrupted_sync_is_replaced_too() -> None:
    """None is left then, so the sync waits for new ones."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    break_replica(pool.replicas()[1], "load")
    pool.replicas()[0].on["abandon_weight_update"] = die
    exporter.tensors = random_tensors(seed=5)
    report = sender.publish(1)
    assert report.restarted == ("replica 0", "replica 1")
    assert set(pool.restarted) == {"replica 0", "replica 1"} and pool.replaced_later == []
    assert_received(pool, exporter.tensors)


def test_a_failure_that_nobody_has_caused_costs_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of them may be the one that hangs, or has computed with what it got."""
    pool = FakePool(1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    monkeypatch.setattr(failure, "find_cause", lambda *_: FailureCause((), ("a circle of waits",)))
    break_replica(pool.replicas()[1], "load")
    exporter.tensors = random_tensors(seed=5)
    assert sender.publish(1).restarted == ("replica 0", "replica 1")
    assert set(pool.restarted) == {"replica 0", "replica 1"} and pool.replaced_later == []
    assert_received(pool, exporter.tensors)


def test_when_no_attempt_is_left_no_replica_serves_half_of_the_weights() -> None:
    """The second attempt fails on the replica that the first one has interrupted."""
    pool = FakePool(1, 1, 1)
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    sender.publish(0)
    break_replica(pool.replicas()[1], "load")
    survivor, other = pool.replicas()[0], pool.replicas()[2]

    def second() -> None:
        if "abandon_weight_update" in survivor.calls:
            die()

    survivor.on["update_weights"] = second
    exporter.tensors = random_tensors(seed=5)
    with pytest.raises(WeightSyncError, match="replica 0 failed in update_weights") as info:
        sender.publish(1)
    assert info.value.needs_restart == ("replica 0", "replica 2")
    assert not other.serving and other.failed is not None and other.version == "0"
    with pytest.raises(RuntimeError):
        other.call("resume", timeout_s=60.0)


def test_an_engine_that_never_joins_is_named() -> None:
    pool = FakePool(1, 1)
    release = threading.Event()

    def hang() -> None:
        release.wait(300)
        raise RuntimeError("released")

    pool.replicas()[1].on["init_weight_transfer"] = hang
    sender = WeightSender(with_settings(rpc_s=2.0), ListExporter(random_tensors()))
    with pytest.raises(WeightSyncError, match="engine replica 1") as info:
        sender.connect(pool)
    release.set()
    assert info.value.failed_members == ("engine replica 1 worker 0",) and info.value.needs_restart == ("replica 1",)


def test_a_replica_that_was_in_a_failed_sync_before_the_trainer_came_is_restarted() -> None:
    """The trainer was killed in the middle of a sync, for example, and restarted."""
    pool = FakePool(1, 1)

    def refuse() -> None:
        raise RuntimeError("this replica took part in a failed weight sync and must be restarted")

    pool.replicas()[1].on["init_weight_transfer"] = refuse
    sender, exporter = make_sender(pool, with_settings(restarts=1))
    assert pool.restarted == ["replica 1"]
    sender.publish(3)
    assert_received(pool, exporter.tensors)


def test_after_a_failure_for_good_the_next_publish_forms_a_new_group() -> None:
    pool = FakePool(1)
    sender, exporter = make_sender(pool)
    pool.replicas()[0].loaders[0].before_load = lambda _: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(WeightSyncError):
        sender.publish(0)
    pool.restart(["replica 0"], 1.0)
    sender.publish(1)
    assert_received(pool, exporter.tensors)


def test_only_the_leader_has_the_pool() -> None:
    with pytest.raises(ValueError, match="trainer rank 0"):
        WeightSender(SETTINGS, ListExporter(random_tensors())).connect(None)


def test_every_setting_is_read_from_the_config() -> None:
    settings = config(
        "model",
        run__dir="runs/of-a-test",
        weight_sync={"bucket_mb": 1.5, "transport": "gloo", "recompute_kv": False, "restarts": 4},
        timeouts={"weight_sync_s": 11.0, "rpc_s": 12.0, "engine_start_s": 13.0},
    )
    expected = SyncSettings(
        bucket_bytes=3 * 2**19, transport="gloo", recompute_kv=False, sync_s=11.0, rpc_s=12.0,
        restart_s=13.0, restarts=4, run_dir=Path("runs/of-a-test"), asleep=True,
    )  # fmt: skip
    default = SyncSettings()
    untested = [each.name for each in fields(default) if getattr(expected, each.name) == getattr(default, each.name)]
    assert untested == [], "a value of the test is the default, which would hide that a field is not read"
    assert SyncSettings.of(settings.weight_sync, settings.timeouts, settings.run_dir, asleep=True) == expected


def test_the_store_is_on_loopback_only_if_no_engine_can_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "reachable_address", lambda: "10.0.0.7")
    monkeypatch.delenv(NODE_ADDRESS_VARIABLE, raising=False)
    assert store_address(RayConfig()) == "127.0.0.1"
    assert store_address(RayConfig(address="10.0.0.9:6379")) == "10.0.0.7"
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "10.0.0.8")
    assert store_address(RayConfig()) == "10.0.0.8"
