"""The addresses at which the user has asked a process of a run on one host to listen."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.commands.doctor import chosen_addresses as chosen
from megarl.commands.doctor.chosen_addresses import addresses_of_environment, chosen_addresses, hosts_of_torchrun
from tests.support.configs import config

INTERFACES = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.0.1.7", "ib0": "10.1.0.7", "docker0": "172.17.0.1"}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: [SimpleNamespace(address=address)] for name, address in INTERFACES.items()}
    monkeypatch.setattr(chosen.psutil, "net_if_addrs", lambda: found)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, set()),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}, {"lo"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"eth0"}),
        ({"NCCL_SOCKET_IFNAME": "eth"}, {"eth0", "eth1"}),
        ({"NCCL_SOCKET_IFNAME": "=eth1,ib0"}, {"eth1", "ib0"}),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, {"eth0", "eth1", "ib0"}),
        ({"VLLM_HOST_IP": "10.1.0.7", "GLOO_SOCKET_IFNAME": ""}, {"ib0"}),
    ],
)
def test_variables_of_gloo_nccl_and_vllm(environment: dict[str, str], names: set[str]) -> None:
    assert set(addresses_of_environment(environment)) == {INTERFACES[name] for name in names}


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["--nproc-per-node", "2"], []),
        (["--local-addr", "10.0.0.7"], ["10.0.0.7"]),
        (["--local_addr=10.0.0.7", "--rdzv-endpoint", "n1:29400"], ["10.0.0.7", "n1"]),
        (["--rdzv-endpoint=::1"], ["::1"]),
        (["--local-addr"], [""]),
    ],
)
def test_options_of_torchrun(options: list[str], hosts: list[str]) -> None:
    assert list(hosts_of_torchrun(["python", "torchrun", *options])) == hosts


def test_hosts_of_the_config_are_those_of_their_processes_alone() -> None:
    found: Any = config(
        "model", door__enabled=True, door__host="10.0.0.7", telemetry__prometheus_port=9400,
        telemetry__prometheus_host="10.0.0.8",
    )  # fmt: skip
    roles = {1: "door", 2: "queue storage", 3: "torchrun", os.getpid(): "supervisor"}
    expected: dict[int, set[str]] = {1: {"10.0.0.7"}, 2: set(), 3: set(), os.getpid(): {"10.0.0.8"}}
    assert chosen_addresses(roles, found, os.getpid()) == expected
    assert chosen_addresses(roles, None, None) == {pid: set() for pid in roles}
    unnamed = config("model", door__enabled=True)
    assert chosen_addresses(roles, unnamed, os.getpid()) == {pid: set() for pid in roles}


def test_environment_and_command_are_those_of_the_living_process() -> None:
    named = {"VLLM_HOST_IP": "10.0.0.7", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "--local-addr", "10.0.0.9"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **named},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        process.stdout.readline()  # until then the command may be that of this process
        for role, address in (("trainer rank", "10.0.0.7"), ("engine", "10.0.0.7"), ("torchrun", "10.0.0.9")):
            assert address in chosen_addresses({process.pid: role}, None, None)[process.pid], role
        assert chosen_addresses({process.pid: "queue storage"}, None, None) == {process.pid: set()}
    finally:
        process.communicate(timeout=120)
    assert chosen_addresses({process.pid: "engine"}, None, None) == {process.pid: set()}, "it has ended"


def test_a_name_that_nobody_knows_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("not known")

    monkeypatch.setattr(chosen.socket, "getaddrinfo", unknown)
    assert list(addresses_of_environment({"VLLM_HOST_IP": "nobody"})) == []
