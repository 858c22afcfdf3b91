"""The one of its addresses that a node gives to the others."""

import pytest

from megarl.cluster.pool import network
from megarl.cluster.pool.network import interface_of, one_node_environment, own_address
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.schema.job import RayConfig


def test_own_address() -> None:
    assert own_address(["127.0.0.1"], "lo") == "127.0.0.1" and interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"launch\.interface: this node has no 'nope0'"):
        own_address([], "nope0")
    # Names that resolve to nothing or to loopback are no help; what remains is the way out, if there is one.
    assert own_address(["no-such-host.invalid", "localhost"]) == own_address([])
    assert interface_of(own_address([])) is not None


def test_other_nodes_without_ipv4_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback would be given to the other nodes, silently."""
    monkeypatch.setattr(network, "_towards", lambda host: None)
    with pytest.raises(ValueError, match=r"no IPv4 route to the other nodes \(fd00::1, fd00::2\)"):
        own_address(["fd00::1", "fd00::2"])
    assert own_address(["::1"]) == own_address([]) == "127.0.0.1"


def test_a_run_without_an_agent_stays_on_loopback_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (NODE_ADDRESS_VARIABLE, "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    alone = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert one_node_environment(RayConfig()) == alone
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in one_node_environment(RayConfig())
    assert one_node_environment(RayConfig(address="10.0.0.1:6379")) == {}
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "10.0.0.7")
    assert one_node_environment(RayConfig()) == {}


def test_torchrun_on_several_nodes_without_agents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 nodes without megarl"):
        one_node_environment(RayConfig())
    monkeypatch.setenv(NODE_ADDRESS_VARIABLE, "10.0.0.7")
    assert one_node_environment(RayConfig()) == {}
