"""The gateway listens at one address: loopback on one host, the node's own in a job of several, or the chosen one.

Its model has a name that says whose it is.
"""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.checks.sections import serving_problems
from megarl.config.checks.telemetry import ANY_ADDRESS
from megarl.gateway.actor import GatewayActor, model_names
from tests.support.trainer.configs import config

OTHER = "127.0.0.9"  # of this machine too, where a listener at all addresses would answer


class KeptListener:
    """In place of the HTTP server: it keeps the listener."""

    async def start(self, listener: socket.socket) -> None:
        self.listener = listener


def opened(**gateway: Any) -> tuple[str, socket.socket]:
    """Open a gateway, without an actor; return the address that it tells, and its listener."""
    actor = object.__new__(GatewayActor)
    actor.config, actor.spec = config("model", gateway={"enabled": True, **gateway}), SimpleNamespace(port=0)  # type: ignore[assignment]
    server: Any = KeptListener()
    actor._server = server
    host, port = asyncio.run(actor._open())
    assert server.listener.getsockname()[:2] == (host, port)
    return host, server.listener


def answers(address: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(5.0)
        return client.connect_ex((address, port)) == 0


@pytest.mark.parametrize(
    ("node", "host", "bound"),
    [
        (None, None, "127.0.0.1"),
        ("", None, "127.0.0.1"),
        ("127.0.0.2", None, "127.0.0.2"),
        (None, "127.0.0.3", "127.0.0.3"),
        ("127.0.0.2", "127.0.0.3", "127.0.0.3"),
    ],
)
def test_the_gateway_listens_at_one_address_only(
    node: str | None, host: str | None, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NODE_ADDRESS_VARIABLE, raising=False)
    if node is not None:
        monkeypatch.setenv(NODE_ADDRESS_VARIABLE, node)
    reported, listener = opened(host=host)
    with listener:
        port = listener.getsockname()[1]
        assert reported == bound and answers(bound, port)
        assert not answers(OTHER, port)


@pytest.mark.parametrize("wildcard", sorted(ANY_ADDRESS))
def test_all_addresses_are_refused(wildcard: str) -> None:
    problems = list(serving_problems(config("model", gateway={"enabled": True, "host": wildcard})))
    assert any(each.startswith("gateway.host: ") and "all addresses" in each for each in problems)


def test_a_model_is_named_by_its_directory_and_an_exported_one_by_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_names(tmp_path / "Qwen3-0.6B") == ("Qwen3-0.6B", str(tmp_path / "Qwen3-0.6B"))
    assert model_names(Path("runs/quickstart/hf")) == ("quickstart", "runs/quickstart/hf")
    (tmp_path / "mine" / "hf").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "hf")
    assert model_names(Path(".")) == ("mine", ".")
    assert model_names(Path("/")) == ("/",)
