"""A replica without its engine: errors out of the engine's log, and no generation without weights."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from megarl.common.errors import EngineMayRun, ReplicaFailed
from megarl.common.process.processes import ProcessId, own_children, still_alive, sweep
from megarl.config.schema import TimeoutsConfig
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine import replica as replica_module
from megarl.rollout.engine.engine_args import EngineStart
from megarl.rollout.engine.engine_errors import root_cause
from megarl.rollout.engine.messages import GenerateRequest, SamplingSpec
from megarl.rollout.engine.replica import EngineReplica, ReplicaSpec
from megarl.rollout.engine.replica_start import start_replica
from tests.support.pool.pool import pool_config


def test_the_engines_own_error_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1509] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1510] rust.SafetensorError: invalid header length\n"
        "2026-11-21 01:26:22 ERROR megarl.rollout.engine.replica: RuntimeError: Engine core initialization failed. See above\n"  # noqa: E501
    )
    assert root_cause(log) == "rust.SafetensorError: invalid header length"
    assert root_cause(log, start=log.stat().st_size) == ""
    log.write_text("(EngineCore pid=7) INFO 11-21 01:26:19 [core.py:1] no Error: here\n")
    assert root_cause(log) == ""


class FakeEngine:
    """The calls of AsyncLLM that a weight sync and a request make; it answers every request with one token."""

    errored = False

    def __init__(self) -> None:
        self.version = "default"
        self.salts: list[str | None] = []
        self.calls: list[Any] = []  # of the weight sync, and whether it generates
        self.refuses = self.hangs = False
        self.output_processor = SimpleNamespace(_update_stats_from_output=lambda *_: None)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    async def collective_rpc(self, method: str) -> list[int]:
        if method != "held_bytes":
            self.calls.append(method)
        return [5, 7]  # of its workers

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        if self.refuses:
            raise RuntimeError("an interrupted reload left 3 tensors")
        if self.hangs:
            await asyncio.sleep(60)
        self.calls.append(request.update_info)

    async def finish_weight_update(self, version: str | None) -> None:
        self.calls.append(("finish", version))
        self.version = version or self.version

    async def reset_encoder_cache(self) -> None:
        self.calls.append("reset encoder cache")

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def generate(self, prompt: Any, parameters: Any, request_id: str, priority: int = 0) -> AsyncIterator[Any]:
        self.salts.append(prompt.get("cache_salt"))
        span = SimpleNamespace(version=self.version, start=0, end=1)
        logprobs = SimpleNamespace(logprobs=[-0.5], token_ids=[7])
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7], logprobs=logprobs, weight_versions=[span], finish_reason="length")]
        )


REQUEST = GenerateRequest("r", [1, 2], SamplingSpec(max_tokens=1, temperature=1.0, stop_token_ids=()), seed=0)


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_weights: bool, share_gpus: bool = False
) -> EngineReplica:
    config = pool_config(tmp_path, rollout={"load_weights": load_weights, "share_gpus": share_gpus})
    monkeypatch.setattr(replica_module, "redirect_output", lambda file: None)
    monkeypatch.setattr(replica_module, "engine_environment", lambda *_, **__: {})
    monkeypatch.setattr(EngineReplica, "_build", lambda self: FakeEngine())
    spec = ReplicaSpec(config.model_dump_json(), str(tmp_path), "run", cuda=False, max_model_len=64, supervisor=None)
    return EngineReplica(spec, 3)


async def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_weights: bool, share_gpus: bool = False
) -> EngineReplica:
    replica = made(tmp_path, monkeypatch, load_weights, share_gpus)
    await replica.start()
    return replica


async def test_an_engine_without_weights_refuses_to_generate_until_a_sync_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement of a lost engine starts in the same way, and refuses too."""
    replica = await started(tmp_path, monkeypatch, load_weights=False)
    with pytest.raises(ReplicaFailed, match="replica 3 has no weights yet"):
        await replica.generate([REQUEST], 60.0)
    await replica.set_weight_version("5")  # a label brings no weights
    await replica.start_weight_update()
    with pytest.raises(ReplicaFailed, match="has no weights yet"):
        await replica.generate([REQUEST], 60.0)
    await replica.finish_weight_update("6")
    report = await replica.generate([REQUEST], 60.0)
    assert report[0]["r"].versions == (VersionSpan(6, 0, 1, replica=3),)


async def test_an_engine_that_slept_wakes_to_serve_only_after_all_weights_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(replica: EngineReplica) -> list[Any]:
        with pytest.raises(ReplicaFailed, match="replica 3 was not put to sleep before a publication"):
            await replica.wake("weights")
        assert await replica.sleep() == 7
        assert await replica.sleep() == 7  # a call that is sent again
        with pytest.raises(ReplicaFailed, match="replica 3 sleeps, and has no memory for new weights"):
            await replica.start_weight_update()
        await replica.resume()  # nothing but the last part resumes it
        await replica.reset()
        await replica.wake("weights")
        with pytest.raises(ReplicaFailed, match="replica 3 has had no weights since it slept"):
            await replica.wake("kv_cache")
        await replica.start_weight_update()
        await replica.update_weights({"sync": 1})
        with pytest.raises(ReplicaFailed, match="in the middle of a weight sync"):
            await replica.wake("kv_cache")
        await replica.finish_weight_update("6")
        assert replica._monitor.silent_s(0.0) == 0.0, "an engine that sleeps is not silent"
        await replica.wake("kv_cache")
        await replica.wake("kv_cache")
        engine: Any = replica._engine
        return list(engine.calls)

    replica = await started(tmp_path, monkeypatch, load_weights=True)
    calls = await run(replica)
    assert calls == [
        ("sleep", 2, "keep"), "pause", ("wake", "weights"), "start", {"sync": 1}, ("finish", "6"), ("wake", "kv_cache"),
    ]  # fmt: skip
    assert (await replica.generate([REQUEST], 60.0))[0]["r"].response_ids == [7]


async def test_an_engine_that_has_not_fallen_asleep_is_asked_again_and_not_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that gave up the wait have ended, and others ask."""
    replica: Any = await started(tmp_path, monkeypatch, load_weights=False)
    fall_asleep, engine = replica._engine.sleep, replica._engine

    async def fails(**_: Any) -> None:
        raise RuntimeError("cuMemUnmap failed")

    engine.sleep = fails
    with pytest.raises(ReplicaFailed, match="sleep failed: RuntimeError: cuMemUnmap failed"):
        await replica.sleep()
    with pytest.raises(ReplicaFailed, match="replica 3 was not put to sleep before a publication"):
        await replica.wake("weights")
    engine.sleep = fall_asleep
    await replica.sleep()
    await replica.wake("weights")
    await replica.sleep()  # from the middle of a publication whose ranks have ended
    assert engine.calls == [("sleep", 2, "keep"), ("wake", "weights"), ("sleep", 2, "keep")]


async def test_an_engine_that_is_asked_to_sleep_while_it_starts_does_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranks that come while it replaces another one. A second sleep would come after it has been woken."""
    replica: Any = made(tmp_path, monkeypatch, load_weights=False, share_gpus=True)
    probed = asyncio.Event()
    monkeypatch.setattr(replica, "_probe", lambda engine: probed.wait())
    starting = asyncio.create_task(replica.start())
    await asyncio.sleep(0)
    asked = asyncio.create_task(replica.sleep())
    await asyncio.sleep(0.01)
    assert replica._engine.calls == []
    probed.set()
    await asyncio.gather(starting, asked)
    assert replica._engine.calls == [("sleep", 2, "keep")]


async def test_a_replica_that_was_ended_before_its_start_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarted ranks build on its GPU: a start that was on its way would find it in use."""
    replica: Any = made(tmp_path, monkeypatch, load_weights=False, share_gpus=True)
    with pytest.raises(ReplicaFailed, match="has no engine"):
        await replica.sleep()
    await replica.shutdown()
    with pytest.raises(ReplicaFailed, match="replica 3 was ended before its engine started"):
        await replica.start()
    assert replica._engine is None


async def test_a_replica_ends_when_all_processes_of_its_engine_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM neither waits for those that it kills, nor knows those of one that has died. Their memory is needed."""
    process = multiprocessing.get_context("spawn").Process(target=subprocess.run, args=(["sleep", "600"],))
    process.start()
    while len(processes := own_children()) < 2:
        assert process.is_alive()
        await asyncio.sleep(0.05)
    try:
        replica: Any = await started(tmp_path, monkeypatch, load_weights=False)
        replica._engine.shutdown = lambda timeout: None
        process.kill()
        process.join()
        assert len(still_alive(processes)) == 1
        await replica.shutdown()
        assert not still_alive(processes)
    finally:
        process.kill()
        sweep(processes, grace_s=0.0)
    replica._engine = FakeEngine()
    replica._engine.shutdown = lambda timeout: None
    bounds_s = list[float]()

    def in_vain(processes: object, grace_s: float, timeout_s: float) -> set[ProcessId]:
        bounds_s.append(timeout_s)
        return {ProcessId.own()}

    monkeypatch.setattr(replica_module, "sweep", in_vain)
    with pytest.raises(EngineMayRun, match=f"replica 3: processes {os.getpid()} of its engine do not end"):
        await replica.shutdown()
    with pytest.raises(EngineMayRun):
        await replica.shutdown()
    assert bounds_s == [replica.config.timeouts.rpc_s / 2] * 2


async def test_an_engine_on_shared_gpus_starts_asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica: Any = await started(tmp_path, monkeypatch, load_weights=False, share_gpus=True)
    assert replica._engine.calls == [("sleep", 2, "keep")]
    assert replica._weights.asleep == {"weights", "kv_cache"}


@pytest.mark.parametrize("cuda", [True, False])
async def test_woken_memory_of_a_gpu_is_zeroed_before_weights_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    replica: Any = await started(tmp_path, monkeypatch, load_weights=False, share_gpus=True)
    replica.cuda = cuda
    await replica.wake("weights")
    assert replica._engine.calls[1:] == [("wake", "weights"), *(["zero_lost"] if cuda else [])]


@pytest.mark.parametrize(("interval_s", "hold_s"), [(0.1, 0.05), (5.0, 0.2)])
def test_an_engine_holds_no_tokens_for_longer_than_reports_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float, hold_s: float
) -> None:
    """The tokens that a lost engine takes with it are those of one interval, what its process holds included."""
    built: list[float] = []
    monkeypatch.setattr(replica_module, "redirect_output", lambda file: None)
    monkeypatch.setattr(replica_module, "engine_environment", lambda *_, **__: {})
    monkeypatch.setattr(replica_module, "engine_args", lambda *_, **__: {})
    monkeypatch.setattr(replica_module, "build_monitored", lambda arguments, monitor, hold_s: built.append(hold_s))
    monkeypatch.setattr(EngineCoreProc, "run_engine_core", staticmethod(EngineCoreProc.run_engine_core))
    config = pool_config(tmp_path, rollout={"report_interval_s": interval_s})
    spec = ReplicaSpec(config.model_dump_json(), str(tmp_path), "run", cuda=False, max_model_len=64, supervisor=None)
    EngineReplica(spec, 3)._build()
    assert built == [hold_s]
    assert isinstance(EngineCoreProc.run_engine_core, EngineStart), "its process would start slowly"


def test_a_replica_that_is_started_tells_when_it_has_its_place() -> None:
    """The place looks free until then, and afterwards the engine may still need minutes."""
    order: list[str] = []

    def method(name: str) -> Any:
        async def call() -> None:
            order.append(name)

        return SimpleNamespace(remote=call)

    handle: Any = SimpleNamespace(__ray_ready__=method("ready"), start=method("start"))
    assert asyncio.run(start_replica(handle, 3, TimeoutsConfig(), placed=lambda: order.append("placed"))) is handle
    assert order == ["ready", "placed", "start"]


@pytest.mark.parametrize(
    ("trained", "left_out", "resets"),
    [("none", [], 1), ("none", ["visual.a"], 0), ("projector", ["visual.a"], 1), ("all", [], 1)],
)
async def test_image_embeddings_are_dropped_only_after_a_sync_of_the_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, left_out: list[str], resets: int
) -> None:
    replica = await started(tmp_path, monkeypatch, load_weights=True)
    vision = replica.config.model.vision.model_copy(update={"train": trained})
    model = replica.config.model.model_copy(update={"vision": vision})
    replica._sees, replica.config = True, replica.config.model_copy(update={"model": model})
    await sync(replica, "6", left_out=left_out)
    assert replica._engine.calls.count("reset encoder cache") == resets  # type: ignore[union-attr]


@pytest.mark.parametrize("recompute", [True, False])
async def test_a_kept_cache_is_for_the_requests_in_flight_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """Else later requests with the same prompt would have values of the old weights under the new version."""
    replica = await started(tmp_path, monkeypatch, load_weights=True)
    await replica.generate([REQUEST], 60.0)
    await replica.pause(recompute)
    await replica.generate([REQUEST], 60.0)
    _, before, after = replica._engine.salts  # type: ignore[union-attr]  # the first is the probe's
    assert (before == after) is recompute


async def sync(replica: EngineReplica, version: str, **update: Any) -> None:
    await replica.pause()
    await replica.start_weight_update()
    await replica.update_weights(update)
    await replica.finish_weight_update(version)
    await replica.resume()


async def test_a_replica_whose_sync_was_interrupted_stays_paused_until_it_has_taken_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await started(tmp_path, monkeypatch, load_weights=False)
    engine: Any = replica._engine
    await sync(replica, "1")
    await replica.pause()
    await replica.start_weight_update()
    await replica.update_weights({})
    for call in (replica.resume, replica.reset):
        with pytest.raises(ReplicaFailed, match="replica 3 was left in the middle of a weight sync"):
            await call()
    engine.calls.clear()
    await replica.abandon_weight_update({"abandon": True})
    assert engine.calls == [{"abandon": True}, ("finish", None)], "vLLM's session has to be ended"
    for call in (replica.resume, replica.reset):
        with pytest.raises(ReplicaFailed, match="replica 3 holds weights of two versions"):
            await call()
    await replica.abandon_weight_update({"abandon": True})  # nothing is left to give up
    assert len(engine.calls) == 2 and engine.version == "1"
    await sync(replica, "2")
    assert engine.calls[-1] == "resume" and engine.version == "2"
    await replica.reset()


async def test_a_replica_that_cannot_give_up_a_sync_stays_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await started(tmp_path, monkeypatch, load_weights=False)
    await replica.pause()
    await replica.start_weight_update()
    await replica.update_weights({})
    replica._engine.refuses = True  # type: ignore[union-attr]
    with pytest.raises(ReplicaFailed, match=r"abandon_weight_update failed: .*left 3 tensors"):
        await replica.abandon_weight_update({"abandon": True})
    with pytest.raises(ReplicaFailed, match="in the middle of a weight sync"):
        await replica.resume()


async def test_an_engine_that_dies_in_a_sync_is_noticed_although_its_call_is_never_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the sync would know it by its deadline only."""
    replica = await started(tmp_path, monkeypatch, load_weights=False)
    engine: Any = replica._engine
    await replica.pause()
    await replica.start_weight_update()
    engine.hangs = True
    updating = asyncio.create_task(replica.update_weights({}))
    await asyncio.sleep(2 * replica_module.DEATH_CHECK_S)
    assert not updating.done(), "an engine that lives may take its time"
    manager = SimpleNamespace(finished_procs=lambda: {"EngineCore": -signal.SIGKILL})
    engine.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    engine.errored = True
    async with asyncio.timeout(20):
        expected = r"replica 3 is dead: its engine's process ended in update_weights \(killed by SIGKILL\)"
        with pytest.raises(ReplicaFailed, match=expected):
            await updating
    with pytest.raises(ReplicaFailed, match="replica 3 is dead"):
        await replica.pause()
