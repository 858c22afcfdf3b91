"""Config to vLLM's arguments, devices of the two pools, and the small pure parts around them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.errors import ReplicaFailed, RolloutError
from megarl.config.engine_checks import engine_problems
from megarl.rollout.batch_stats import BatchStats, BusyClock, quantile
from megarl.rollout.devices import Held, refuse_overlap, refuse_split_replica, visible_devices
from megarl.rollout.engine_args import engine_args, engine_environment
from megarl.rollout.replica import root_cause
from tests.support.pool import pool_config


def config(tmp_path: Path, **sections: dict):
    return pool_config(tmp_path, tmp_path / "no_model_needed", **sections)


def test_on_cpu_one_process_runs_the_model_eagerly(tmp_path: Path) -> None:
    args = engine_args(config(tmp_path), cuda=False, max_model_len=80)
    assert args["distributed_executor_backend"] == "uni" and args["enforce_eager"] is True
    assert args["dtype"] == "float32" and args["logprobs_mode"] == "processed_logprobs" and args["max_model_len"] == 80
    environment = engine_environment(config(tmp_path), cuda=False)
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "VLLM_CPU_OMP_THREADS_BIND" not in environment


def test_tensor_parallel_engines_get_workers_and_cores(tmp_path: Path) -> None:
    two = config(tmp_path, rollout={"tensor_parallel": 2, "cpu_kv_cache_gib": 3})
    assert engine_args(two, cuda=False)["distributed_executor_backend"] == "mp"
    environment = engine_environment(two, cuda=False)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1" and environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


def test_on_gpu_nothing_of_the_cpu_path_remains(tmp_path: Path) -> None:
    gpu = config(tmp_path, trainer={"precision": "bf16"})
    args = engine_args(gpu, cuda=True)
    assert args["distributed_executor_backend"] is None and args["enforce_eager"] is False
    assert args["dtype"] == "bfloat16"
    assert not any("CPU" in name or "DYNAMO" in name for name in engine_environment(gpu, cuda=True))


def test_engine_kwargs_cannot_undo_what_training_relies_on(tmp_path: Path) -> None:
    passed = config(tmp_path, rollout={"engine_kwargs": {"block_size": 32}})
    assert engine_args(passed, cuda=False)["block_size"] == 32
    broken = config(tmp_path, rollout={"engine_kwargs": {"logprobs_mode": "raw_logprobs"}})
    with pytest.raises(ValueError, match=r"rollout\.engine_kwargs\.logprobs_mode.*temperature"):
        engine_args(broken, cuda=False)


@pytest.mark.parametrize("cuda", [False, True])
def test_the_plan_refuses_what_the_replica_refuses(tmp_path: Path, cuda: bool) -> None:
    """What megarl passes itself, apart from what only has a better default there."""
    defaults = {"disable_log_stats", "enable_prefix_caching", "enable_chunked_prefill", "max_num_batched_tokens"}
    for name in set(engine_args(config(tmp_path), cuda=cuda, max_model_len=80)) - defaults | {"weight_transfer_config"}:
        broken = config(tmp_path, rollout={"engine_kwargs": {name: None}})
        assert [problem.split(": ")[0] for problem in engine_problems(broken)] == [f"rollout.engine_kwargs.{name}"]
        with pytest.raises(ValueError, match=rf"rollout\.engine_kwargs\.{name}: not for the user"):
            engine_args(broken, cuda=cuda)


def test_shared_gpus_are_refused_by_name() -> None:
    trainer = [Held("trainer rank 0", "a", ("GPU-1",)), Held("trainer rank 1", "a", ("GPU-2",))]
    refuse_overlap(trainer, [Held("replica 0", "a", ("GPU-3",)), Held("replica 1", "b", ("GPU-2",))])
    with pytest.raises(RolloutError, match=r"GPU-2 on a \(by trainer rank 1 and replica 0\)"):
        refuse_overlap(trainer, [Held("replica 0", "a", ("GPU-2", "GPU-4"))])
    refuse_overlap([Held("trainer rank 0", "a", ())], [Held("replica 0", "a", ())])


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


def test_replica_failures_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ReplicaFailed(4, "replica 4 died")))
    assert (error.replica, str(error)) == (4, "replica 4 died")


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=20))
def test_busy_time_is_the_union_of_the_intervals(spans: list[tuple[int, int, int]]) -> None:
    """(leaving, time at the engine, time on the way): the time on the way is not the engine's."""
    clock, busy = BusyClock(), set()
    ends = sorted((start + length + way, length, start, key) for key, (start, length, way) in enumerate(spans))
    for key, (start, _, _) in enumerate(spans):
        clock.enter(key, start)
    for end, length, _, key in ends:
        clock.leave(key, end, length)
        busy |= set(range(end - length, end))
    assert clock.take(1000) == len(busy)
    assert clock.take(2000) == 0


def test_a_running_request_counts_up_to_now_and_once() -> None:
    clock = BusyClock()
    clock.enter(1, 1.0)
    assert clock.take(3.5) == 2.5
    clock.leave(1, 4.0, 2.9)
    assert clock.take(9.0) == 0.5
    with pytest.raises(KeyError):
        clock.leave(1, 9.0, 1.0)
    clock.enter(2, 10.0)
    clock.leave(2, 11.0, 5.0)  # no longer than it was away
    assert clock.take(12.0) == 1.0


def test_batch_metrics() -> None:
    stats = BatchStats([0.1, 0.4, 0.2, 0.3], [0.01, 0.03], Counter({"timeout": 2, "crash": 1}), skipped_prompts=5)
    values = stats.metrics(queue_depth=3, replicas_alive=2)
    assert values["reward/errors"] == 3 and values["rollout/skipped_prompts"] == 5
    assert values["rollout/generate_seconds_max"] == 0.4 and values["rollout/generate_seconds_p50"] == 0.3
    assert values["rollout/reward_seconds_mean"] == pytest.approx(0.02)
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert "rollout/generate_seconds_p50" not in BatchStats().metrics(queue_depth=0, replicas_alive=1)


def test_batch_metrics_are_declared() -> None:
    from megarl.telemetry.declarations import step_metrics

    metrics = step_metrics()
    metrics.update(BatchStats([0.1], [0.1]).metrics(queue_depth=0, replicas_alive=1))
    assert metrics.reduce()["rollout/replicas_alive"] == 1


def test_the_engines_own_error_is_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1509] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-21 01:26:19 [core.py:1510] rust.SafetensorError: invalid header length\n"
        "2026-11-21 01:26:22 ERROR megarl.rollout.replica: RuntimeError: Engine core initialization failed. See above\n"
    )
    assert root_cause(log) == "rust.SafetensorError: invalid header length"
    assert root_cause(log, start=log.stat().st_size) == ""
    log.write_text("(EngineCore pid=7) INFO 11-21 01:26:19 [core.py:1] no Error: here\n")
    assert root_cause(log) == ""
