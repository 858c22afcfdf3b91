"""The ports of Ray's agents are kept for them, and Ray has to use these."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megarl.cluster.nodes import raylet
from megarl.cluster.nodes.spec import LaunchSpec, launch_directory
from megarl.cluster.pool.ray_head import RAY_PORTS, RayHead, RayShare, ReservedPorts
from tests.support.trainer.configs import config


def given_to_ray() -> list[int]:
    """The ports that Ray's parameters have when they are made now."""
    from ray._private import parameter

    made = parameter.RayParams()
    return [made.metrics_export_port, made.metrics_agent_port, made.runtime_env_agent_port]


def test_a_head_starts_ray_with_ports_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def init(**options: object) -> SimpleNamespace:
        seen.append(given_to_ray())
        return SimpleNamespace(address_info={"gcs_address": "127.0.0.1:1"})

    monkeypatch.setattr("ray.init", init)
    head = RayHead(RayShare(1, 0, {}), "namespace", tmp_path, 30.0, tmp_path / "private")
    head.start()
    assert seen == [head.ports.ports] and len(set(seen[0])) == RAY_PORTS


def test_the_raylet_of_a_further_node_gets_the_ports_that_its_process_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def node(self: object, parameters: object, **options: object) -> None:
        seen.append(given_to_ray())

    monkeypatch.setattr("ray._private.node.Node.__init__", node)
    monkeypatch.setattr("ray._private.node.Node.__del__", lambda self: None, raising=False)
    monkeypatch.setenv("MEGARL_NODE_ADDRESS", "127.0.0.1")
    with ReservedPorts(RAY_PORTS) as reserved:
        raylet._start("127.0.0.1:1", RayShare(0, 0, {}), tmp_path, reserved)
        assert seen == [reserved.ports]


class Started(Exception):
    """Ends a raylet's process where Ray would start."""


@pytest.mark.parametrize(
    ("nodes", "index", "given", "reported", "gpus"),
    [
        ("separate", 0, None, None, 0),
        ("separate", 3, None, "0,1", 2),
        ("separate", 3, "4,5,6,7", "4,5", 2),
        ("shared", 1, None, "2,3", 2),
        ("shared", 1, "4,5,6,7", "6,7", 2),
    ],
)
def test_the_raylet_of_a_rollout_node_sees_its_gpus_only_and_sweeps_what_dead_runs_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    nodes: str, index: int, given: str | None, reported: str | None, gpus: int,
) -> None:  # fmt: skip
    """On a trainer node nothing is scheduled, so nothing is given to it; a shared node's trainer has the other GPUs."""
    run_dir = tmp_path / "run"
    chosen = config(
        "model", run__dir=str(run_dir), trainer__gpus=4, trainer__gpus_per_node=2,
        rollout={"replicas": 4, "gpus_per_node": 2, "nodes": nodes},
    )  # fmt: skip
    directory = launch_directory(run_dir, "1")
    directory.mkdir(parents=True)
    spec = LaunchSpec("1", chosen.model_dump_json(), str(directory), "/", True, ("a", "b", "c", "d"), "train.py", 0)
    spec.save()
    seen = list[tuple[str | None, float]]()

    def start(address: str, share: RayShare, *arguments: object) -> None:
        seen.append((os.environ.get("CUDA_VISIBLE_DEVICES"), share.num_gpus))
        raise Started

    monkeypatch.setattr(raylet, "attach_supervisor", lambda *arguments: SimpleNamespace(address="127.0.0.1:1"))
    monkeypatch.setattr(raylet, "access_environment", lambda run_dir: {})
    monkeypatch.setattr(raylet, "die_with_parent", lambda pid: None)
    acts: list[str] = []
    monkeypatch.setattr(raylet, "sweep_dead_directories", lambda: acts.append("sweep"))
    monkeypatch.setattr(raylet, "make_private_directory", lambda: acts.append("make") or tmp_path)
    monkeypatch.setattr(raylet, "use_private_directory", lambda private: None)
    monkeypatch.setattr(raylet, "_start", start)
    monkeypatch.setattr("sys.argv", ["raylet", str(spec.path), str(index), "1"])
    with mock.patch.dict(os.environ), pytest.raises(Started):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if given is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = given
        raylet.main()
    assert seen == [(reported, gpus)] and acts == ["sweep", "make"]
