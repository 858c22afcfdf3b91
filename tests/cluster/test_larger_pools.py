"""Engines of TP 2, and two replicas of which one is lost in mid-generation."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from megarl.common.processes import ProcessId
from megarl.queue.transfer import QueueReader
from tests.support.pool import start_pool
from tests.support.pool_checks import check_rows, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_tensor_parallel_engine_agrees_with_transformers(tmp_path: Path) -> None:
    pool = start_pool(tmp_path, rollout={"tensor_parallel": 2})
    try:
        reader = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
        serve(pool, 0)
        check_rows(pool, reader.fetch(pool.client.wait_batch(0).keys), version=0)
        reader.close()
    finally:
        pool.close()


def test_a_lost_replica_costs_no_group(tmp_path: Path) -> None:
    pool = start_pool(tmp_path, rollout={"replicas": 2}, batch={"groups": 8}, sampling={"max_tokens": 300})
    try:
        reader = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
        replicas = pool.client.engine_handles().replicas()
        victim = ProcessId.of(replicas[1].call("health", timeout_s=60)["pid"])
        for replica in replicas:
            replica.call("set_weight_version", "0", timeout_s=60)
        replicas[1].call("pause", True, timeout_s=60)  # so that it surely holds groups when it dies
        timer = threading.Timer(1.0, os.kill, (victim.pid, signal.SIGKILL))
        timer.start()
        pool.client.set_version(0)
        ready = pool.client.wait_batch(0)
        check_rows(pool, reader.fetch(ready.keys), version=0)
        assert ready.timings["rollout/replicas_alive"] == 1 and ready.timings["rollout/replicas_lost"] == 1
        pool.client.commit(0, trained=8, filtered=0, dropped_stale=0, failed=0)
        pool.client.engine_handles().restart(["replica 1"], timeout_s=1200)
        serve(pool, 1)
        ready = pool.client.wait_batch(1)
        assert ready.timings["rollout/replicas_alive"] == 2 and ready.timings["rollout/replicas_lost"] == 0
        served = [replica.call("health", timeout_s=60)["served"] for replica in pool.client.engine_handles().replicas()]
        assert served[1] == 16
        reader.close()
    finally:
        pool.close()
