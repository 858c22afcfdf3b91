"""The one of its addresses that a node gives to the others."""

from __future__ import annotations

import os

import pytest

from megarl.cluster.nodes.network import interface_of, keep_gloo_on_this_host, own_address


def test_own_address() -> None:
    assert own_address(["127.0.0.1"], "lo") == "127.0.0.1" and interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"launch\.interface: this node has no 'nope0'"):
        own_address([], "nope0")
    # Names that resolve to nothing or to loopback are no help; what remains is the way out, if there is one.
    assert own_address(["no-such-host.invalid", "localhost"]) == own_address([])
    assert interface_of(own_address([])) is not None


def test_gloo_of_a_bare_torchrun_listens_on_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    keep_gloo_on_this_host()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    keep_gloo_on_this_host()
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
