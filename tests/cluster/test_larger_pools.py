"""Engines of TP 2, and two replicas of which one is lost in mid-generation or has a full KV cache."""

import asyncio
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.common.process.processes import ProcessId, descendants, is_alive
from megarl.queue.trajectory import VersionSpan
from megarl.queue.transfer import QueueReader
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.engine.replica_start import replica_name, restart_replica
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.router import FULL
from megarl.rollout.transport.rpc import ReplicaClient
from tests.support.pool.pool import TestPool, start_pool
from tests.support.pool.pool_checks import check_rows, command_of, inside, process_of, reference_logprobs, serve
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_tensor_parallel_engine_agrees_with_transformers(tmp_path: Path) -> None:
    pool = start_pool(tmp_path, rollout={"tensor_parallel": 2})
    try:
        reader = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
        serve(pool, 0)
        check_rows(pool, reader.fetch(pool.client.wait_batch(0).keys), version=0)
        reader.close()
        actor = process_of(pool.client.engine_handles().replicas()[0])
        children = descendants(actor.pid)
        engine = [each for each in children if "resource_tracker" not in command_of(each)]
        assert len(engine) >= 3, "EngineCore and two workers"
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, children)), 60, "the processes of the killed actor")
    finally:
        pool.close()


def test_a_lost_replica_costs_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start_pool(tmp_path, rollout={"replicas": 2}, batch={"groups": 8}, sampling={"max_tokens": 300})
    try:
        reader = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
        replicas = pool.client.engine_handles().replicas()
        victim = process_of(replicas[1])
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
        replicas = pool.client.engine_handles().replicas()
        inside(replicas[1], count_started)
        serve(pool, 1)
        ready = pool.client.wait_batch(1)
        assert ready.timings["rollout/replicas_alive"] == 2 and ready.timings["rollout/replicas_lost"] == 0
        assert inside(replicas[1], lambda actor: len(actor.started)) == 16
        reader.close()
        check_that_reported_tokens_are_kept(pool, process_of(replicas[1]), monkeypatch)
    finally:
        pool.close()


def count_started(actor: Any) -> None:
    """Have a replica's actor keep the requests that it starts as `started`."""
    actor.started, start = [], actor._requests.start

    def start_counted(requests: list[GenerateRequest]) -> None:
        actor.started.extend(requests)
        start(requests)

    actor._requests.start = start_counted


def check_that_reported_tokens_are_kept(pool: TestPool, victim: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 1 is killed after some reports; replica 0, of another version, goes on from their last tokens."""
    import ray

    replicas = {index: ray.get_actor(replica_name(index), namespace=pool.handle.namespace) for index in range(2)}
    spec = SamplingSpec(300, pool.config.sampling.temperature, (2,))
    requests = [GenerateRequest(f"kept{i}", [1, 60 + i], spec, seed=i) for i in range(8)]
    reports: list[tuple[int, dict[str, ResponsePart]]] = []

    async def run() -> list[GenerateResult]:
        fleet = EnginePool(
            replicas,
            pool.config.timeouts,
            restart_replica,  # type: ignore[arg-type]
            report_interval_s=0.1,
            sync_restarts=1,
        )
        call = ReplicaClient.call

        async def watched(client: ReplicaClient, method: str, *args: Any, timeout_s: float) -> Any:
            answer = await call(client, method, *args, timeout_s=timeout_s)
            if method in {"generate", "report"}:
                reports.append((client.index, dict(answer[0])))
                if client.index == 1 and any(part.response_ids for part in answer[0].values()):
                    os.kill(victim.pid, signal.SIGKILL)
            return answer

        monkeypatch.setattr(ReplicaClient, "call", watched)
        for index, version in ((0, "9"), (1, "8")):
            await fleet.call(index, "set_weight_version", version, timeout_s=60)
        results = await fleet.generate(RequestContext("kept", home=1), requests)
        assert fleet.serving == [0] and "replica 1 died while it was asked to report" in str(fleet.lost[1])
        return results

    continued = 0
    for request, result in zip(requests, asyncio.run(run()), strict=True):
        parts = [parts[request.request_id] for index, parts in reports if index == 1 and request.request_id in parts]
        ids = [token for part in parts for token in part.response_ids]
        logprobs = [value for part in parts for value in part.logprobs]
        kept = len(ids)
        assert result.response_ids[:kept] == ids and result.logprobs[:kept] == logprobs
        assert len(result.response_ids) <= spec.max_tokens
        assert (result.response_ids[-1] == 2) == (result.finish_reason == "stop")
        if kept and result.lost_replicas:
            continued += 1
            whole = len(result.response_ids)
            assert result.versions == (VersionSpan(8, 0, kept, replica=1), VersionSpan(9, kept, whole, replica=0))
        expected = reference_logprobs(pool, request.prompt_ids, result.response_ids)
        assert float((torch.tensor(result.logprobs).double() - expected).abs().max()) <= 1e-4
    assert continued


def test_requests_are_held_back_from_the_engine_whose_kv_cache_is_full(tmp_path: Path) -> None:
    """Engines whose caches hold 11 blocks of 128 tokens, and one of them with many times as many requests."""
    cache = {"num_gpu_blocks_override": 12}
    pool = start_pool(tmp_path, rollout={"replicas": 2, "engine_kwargs": cache}, sampling={"max_tokens": 300})
    try:
        first, last, limits = asyncio.run(crowd(pool))
        assert limits[0] == math.inf and limits[1] < GROUPS * IN_GROUP, "the full one alone has a limit"
        assert first.kv_usage >= FULL and first.waiting > 0  # before the first pressure there is no limit
        assert last.waiting < first.waiting / 2
    finally:
        pool.close()


GROUPS, IN_GROUP, WAVES = 10, 4, 2


async def crowd(pool: TestPool) -> tuple[EngineLoad, EngineLoad, list[float]]:
    """Send waves of long responses to replica 1 and one group to replica 0; the load in the first and the last wave."""
    import ray

    replicas = {index: ray.get_actor(replica_name(index), namespace=pool.handle.namespace) for index in range(2)}
    fleet = EnginePool(
        replicas,
        pool.config.timeouts,
        restart_replica,  # type: ignore[arg-type]
        report_interval_s=0.1,
        sync_restarts=1,
    )
    spec = SamplingSpec(300, 1.0, (), ignore_eos=True)
    loads: list[EngineLoad] = []
    for wave in range(WAVES):

        def group(number: int, home: int, name: str = f"{wave}") -> Any:
            requests = [
                GenerateRequest(f"{name}-{number}-{i}", [1, 60 + number], spec, seed=i) for i in range(IN_GROUP)
            ]
            return fleet.generate(RequestContext(f"{name}-{number}", home=home), requests)

        answers = await asyncio.gather(group(GROUPS, 0), *(group(number, 1) for number in range(GROUPS)))
        assert {len(each.response_ids) for results in answers for each in results} == {spec.max_tokens}
        assert {each.replica for results in answers[1:] for each in results} == {1} == {answers[0][0].replica + 1}
        loads.append(fleet.take_load())
    return loads[0], loads[-1], [each.limit for each in fleet.table]
