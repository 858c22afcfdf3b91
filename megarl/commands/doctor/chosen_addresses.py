"""The addresses beyond loopback that the user has named for sockets of a run on one host."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence

import psutil

from megarl.config.schema import Config

# Whoever sets these keeps them: `one_node_environment` adds those that are not set.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ADDRESS_VARIABLE = "VLLM_HOST_IP"
_TORCHRUN_OPTIONS = {"--local-addr", "--rdzv-endpoint"}


def chosen_addresses(roles: Mapping[int, str], config: Config | None, endpoint: int | None) -> dict[int, set[str]]:
    """Return, by pid, the addresses that the user has named for a process.

    These are `door.host`, `telemetry.prometheus_host`, the variables of gloo, NCCL and vLLM, and torchrun's options.
    `endpoint`: pid of the process that serves the metrics to Prometheus.
    """
    return {pid: set(_of_process(pid, role, config, pid == endpoint)) for pid, role in roles.items()}


def _of_process(pid: int, role: str, config: Config | None, serves_metrics: bool) -> Iterator[str]:
    if config is not None and role == "door":
        yield from _resolved(config.door.host)
    if config is not None and serves_metrics:
        yield from _resolved(config.telemetry.prometheus_host)
    with contextlib.suppress(psutil.Error):
        if role == "torchrun":
            for host in hosts_of_torchrun(psutil.Process(pid).cmdline()):
                yield from _resolved(host)
        elif role in {"trainer rank", "engine"}:
            yield from addresses_of_environment(psutil.Process(pid).environ())


def hosts_of_torchrun(command: Sequence[str]) -> Iterator[str]:
    """Yield the hosts at which torchrun was told to listen, from its command line."""
    for word, after in itertools.pairwise([*command, ""]):
        option, has_value, value = word.partition("=")
        if option.replace("_", "-") in _TORCHRUN_OPTIONS:
            endpoint = value if has_value else after
            yield endpoint.rpartition(":")[0] if endpoint.count(":") == 1 else endpoint


def addresses_of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the addresses of the interfaces that gloo and NCCL were told to use, and the one that vLLM was.

    A value is a list of names, for NCCL of their beginnings; `^` before it excludes these, `=` asks for the exact name.
    """
    yield from _resolved(environment.get(_ADDRESS_VARIABLE))
    for variable in _INTERFACE_VARIABLES:
        value = environment.get(variable)
        if not value:
            continue
        begins = tuple(value.lstrip("^=").split(","))
        for name, addresses in psutil.net_if_addrs().items():
            if name.startswith(begins) != value.startswith("^"):
                yield from (each.address.partition("%")[0] for each in addresses)


def _resolved(host: str | None) -> Iterator[str]:
    """Yield the addresses of a host; none if it has no name, or an unknown one."""
    if host:
        with contextlib.suppress(OSError):
            yield from {str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
