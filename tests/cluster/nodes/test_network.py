"""The one of its addresses that a node gives to the others."""

from __future__ import annotations

import pytest

from megarl.cluster.nodes.network import interface_of, own_address


def test_own_address() -> None:
    assert own_address(["127.0.0.1"], "lo") == "127.0.0.1" and interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"launch\.interface: this node has no 'nope0'"):
        own_address([], "nope0")
    # Names that resolve to nothing or to loopback are no help; what remains is the way out, if there is one.
    assert own_address(["no-such-host.invalid", "localhost"]) == own_address([])
    assert interface_of(own_address([])) is not None
