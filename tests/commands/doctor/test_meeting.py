"""The store of `megarl doctor --nodes` listens at one address, and members with a secret read what they signed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from megarl.commands.doctor import meeting
from megarl.commands.doctor.meeting import Meeting, address_to_serve, meet
from megarl.commands.doctor.members import Member
from megarl.common.bound_store import connect_store, serve_store
from megarl.common.errors import ConfigError
from megarl.common.reserved_ports import ReservedPorts
from megarl.common.run_secret import RUN_DIR_VARIABLE
from tests.support.attack import addresses

HERE = "127.0.0.2"  # an address of this machine that stands for one of a network


@pytest.fixture(autouse=True)
def without_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)


@pytest.fixture
def port() -> Iterator[int]:
    with ReservedPorts(1) as reserved:
        yield reserved.ports[0]


def both(first: Member, interface: str | None = None) -> tuple[Meeting, Meeting]:
    """Rank 0 of two, and rank 1."""
    second = Member(1, 2, 0, first.host, first.port, first.agents_name, first.one_host)
    return meet(first, interface, 10.0), meet(second, interface, 10.0)


def test_it_listens_at_the_address_by_which_the_members_know_rank_0(port: int) -> None:
    ours, theirs = both(Member(0, 2, 0, HERE, port))
    assert addresses(port) == {HERE}
    theirs.put("name", {"a": [1, None]})
    assert ours.has("name") and not ours.has("another") and ours.get("name") == {"a": [1, None]}
    stranger = connect_store(HERE, port, 5.0)
    assert json.loads(stranger.get("name")) == {"a": [1, None]}, "without a directory in common nothing is signed"


@pytest.mark.parametrize(
    ("one_host", "interface", "expected"), [(False, None, HERE), (False, "lo", "127.0.0.1"), (True, "lo", "127.0.0.1")]
)
def test_under_torchrun_it_is_the_chosen_interface_or_that_of_the_agent(
    one_host: bool, interface: str | None, expected: str
) -> None:
    agents = serve_store(HERE, 0, 10.0)
    ours, theirs = both(Member(0, 2, 0, HERE, agents.port, "doctor/x/0", one_host), interface)
    assert (ours.host, ours.port) == (theirs.host, theirs.port)
    assert ours.host == expected and addresses(ours.port) == {expected} and ours.port != agents.port
    theirs.put("name", 1)
    assert ours.get("name") == 1


def test_what_a_stranger_writes_is_refused(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    ours, theirs = both(Member(0, 2, 0, HERE, port))
    theirs.put("name", "of a member")
    assert ours.get("name") == "of a member"
    stranger = connect_store(HERE, port, 5.0)
    for value in ('"of a stranger"', stranger.get("name").decode().replace("of a member", "of somebody")):
        stranger.set("name", value)
        with pytest.raises(ConfigError, match="was not written by a process of this run"):
            ours.get("name")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_stranger_in_the_agents_store_leads_nobody_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    agents = serve_store(HERE, 0, 10.0)
    agents.set("doctor/x/0", json.dumps([HERE, 1]))
    with pytest.raises(ConfigError, match="was not written by a process of this run"):
        meet(Member(1, 2, 0, HERE, agents.port, "doctor/x/0"), None, 5.0)


def test_without_a_secret_members_on_one_host_stay_on_it() -> None:
    agents, served = serve_store(HERE, 0, 10.0), serve_store("127.0.0.1", 0, 10.0)
    agents.set("doctor/x/0", json.dumps(["192.0.2.77", served.port]))
    assert meet(Member(1, 2, 0, HERE, agents.port, "doctor/x/0", True), None, 5.0).host == "127.0.0.1"
    agents.set("doctor/x/0", json.dumps(7))
    with pytest.raises(ConfigError, match="rank 1 did not reach rank 0"):
        meet(Member(1, 2, 0, HERE, agents.port, "doctor/x/0", True), None, 5.0)


def test_what_keeps_rank_0_from_serving_it_is_one_message(port: int) -> None:
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7:\d+, which has to be an address .*assign"):
        meet(Member(0, 2, 0, "198.51.100.7", port), None, 5.0)
    taken = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=r"rank 0 cannot serve the store .*in use"):
        meet(Member(0, 2, 0, HERE, port), None, 5.0)
    del taken


@pytest.mark.parametrize(
    ("found", "others", "expected"),
    [
        (["127.0.1.1"], ("n2",), "the route to n2"),  # as Debian's /etc/hosts has it
        (["127.0.1.1"], (), "127.0.1.1"),
        (["127.0.1.1", "10.0.0.7"], ("n2",), "10.0.0.7"),
        (["10.9.9.9"], (), "10.9.9.9"),  # of no interface here: binding will say so
    ],
)
def test_the_address_of_a_name(
    found: list[str], others: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own:
        address = "10.0.0.7"

    def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(meeting.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(meeting.psutil, "net_if_addrs", lambda: {"eth0": [Own()]})
    monkeypatch.setattr(meeting, "own_address", lambda hosts: f"the route to {hosts[0]}")
    assert address_to_serve("n1", others) == expected


def test_an_address_is_served_as_it_is() -> None:
    for host in ("127.0.0.2", "::1"):
        assert address_to_serve(host, ("n2",)) == host
    with pytest.raises(OSError, match="not known"):
        address_to_serve("nobody.invalid", ())
