"""Arguments and environment of a node's processes."""

from pathlib import Path

import pytest

from megarl.cluster.nodes import commands
from megarl.cluster.nodes.topology import make_topology
from megarl.cluster.pool.network import network_environment
from megarl.common.errors import ConfigError
from megarl.config.checks.secrets import user_environment
from tests.support.checkout import ROOT
from tests.support.trainer.configs import config


def test_torchrun_on_two_trainer_nodes() -> None:
    chosen = config(
        "model", trainer={"gpus": 8, "gpus_per_node": 4}, rollout={"replicas": 4, "gpus_per_node": 4},
        launch={"max_restarts": 2, "stop_before_s": 700},
    )  # fmt: skip
    topology = make_topology(chosen)
    first, second = (
        commands.torchrun_command(
            chosen.launch, chosen.timeouts, topology, node, launch_id="7-0", endpoint="10.0.0.1:555",
            address=f"10.0.0.{i}", entry="train.py", config_file="c.yaml",
        )
        for i, node in enumerate(topology.nodes[:2], start=1)
    )  # fmt: skip
    options = dict(zip(first[3:-3:2], first[4:-3:2], strict=True))
    assert options["--nnodes"] == "2" and options["--nproc-per-node"] == "4"
    assert options["--rdzv-backend"] == "megarl", "c10d's listens on all addresses, and unpickles what it finds there"
    assert options["--rdzv-endpoint"] == "10.0.0.1:555" and options["--rdzv-id"] == "7-0"
    assert options["--log-dir"] == "/dev/null", "torchrun would leave a directory"
    assert options["--max-restarts"] == "2" and options["--shutdown-timeout"] == "700"
    assert first[-3:] == ["train.py", "--config", "c.yaml"]
    assert [a for a, b in zip(first, second, strict=True) if a != b] == ["is_host=true,join_timeout=120", "10.0.0.1"]


def test_ranks_that_fail_are_restarted_once() -> None:
    chosen = config("model")
    topology = make_topology(chosen)
    command = commands.torchrun_command(
        chosen.launch, chosen.timeouts, topology, topology.nodes[0], launch_id="7-0", endpoint="10.0.0.1:555",
        address="10.0.0.1", entry="train.py", config_file="c.yaml",
    )  # fmt: skip
    assert command[command.index("--max-restarts") + 1] == "1"


def test_the_shipped_runtime_environment_is_accepted() -> None:
    variables = user_environment(ROOT / "launch/runtime_env.yaml")
    assert variables["NCCL_DEBUG"] == "WARN"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables, "it would hold for engines and experts too"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pip: [x]", "may only have `env_vars`"),
        ("env_vars: {A: 1}", "must be a string; put it in quotes"),
        ("[", "cannot be read"),
    ],
)
def test_other_runtime_environments_are_not(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        user_environment(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        user_environment(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("env_vars: {A: é}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read: .*utf-8"):
        user_environment(tmp_path / "latin.yaml")


def test_gloo_and_nccl_stay_on_loopback_if_there_is_one_node() -> None:
    alone = network_environment("127.0.0.1", "lo", several=False, chosen=False)
    assert alone == {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_between_nodes_nccl_is_told_its_interface_only_if_the_user_has_chosen_it() -> None:
    several = network_environment("1.2.3.4", "eth7", several=True, chosen=False)
    assert several == {"VLLM_HOST_IP": "1.2.3.4", "GLOO_SOCKET_IFNAME": "eth7"}
    chosen = network_environment("1.2.3.4", "eth7", several=True, chosen=True)
    assert chosen["NCCL_SOCKET_IFNAME"] == "=eth7"
