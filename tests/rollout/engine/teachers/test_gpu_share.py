"""Where Ray puts the engines of a teacher that share the GPUs of the policy's engines. Its GPUs are only counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.pool.ray_head import RayHead, rollout_share
from megarl.config.derived.teachers import policy_gpus, teacher_gpus
from megarl.config.schema import Config
from megarl.rollout.engine.placement import engine_needs
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.replica_start import create_replica
from megarl.rollout.engine.teachers.teacher_engine import create_teacher
from tests.support.trainer.configs import config as config_of

GPUS = 2


@pytest.fixture
def config(tmp_path: Path) -> Config:
    teacher = {"name": "big", "path": "big", "replicas": GPUS, "gpu_share": 0.5, "gpu_memory_utilization": 0.4}
    return config_of("model", teachers=[teacher], data__teacher="big",
                     rollout={"replicas": GPUS, "gpu_memory_utilization": 0.5})  # fmt: skip


@pytest.fixture
def spec(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaSpec]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "logs").mkdir()
    head = RayHead(rollout_share(config, cuda=True), "shares", tmp_path / "logs", 200.0)
    head.start()
    try:
        yield ReplicaSpec(config.model_dump_json(), str(tmp_path), "shares", True, 64, None)
    finally:
        head.stop()


def devices(actors: list[Any]) -> list[str]:
    """The GPUs that the processes of actors see."""
    import os

    import ray

    seen = [actor.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for actor in actors]
    return list(ray.get(seen, timeout=200))


@pytest.mark.engine
def test_each_gpu_has_one_engine_of_the_policy_and_one_of_the_teacher(config: Config, spec: ReplicaSpec) -> None:
    import ray

    assert engine_needs(policy_gpus(config.rollout, config.teachers), cuda=True)["GPU"] == pytest.approx(0.5, abs=0.002)
    assert engine_needs(teacher_gpus(config.teachers[0]), cuda=True)["GPU"] == pytest.approx(0.5, abs=0.002)
    policy = [create_replica(spec, index) for index in range(GPUS)]
    of_policy = devices(policy)
    assert sorted(of_policy) == ["0", "1"]
    teachers = [create_teacher(spec, "big", number) for number in range(GPUS)]
    assert sorted(devices(teachers)) == ["0", "1"]
    assert ray.available_resources().get("GPU", 0.0) == 0.0
    ray.kill(policy[0])  # its place is the only one for the engine that replaces it
    assert devices([create_replica(spec, GPUS)]) == [of_policy[0]]
