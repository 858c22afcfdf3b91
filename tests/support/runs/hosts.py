"""Several hosts on one machine: network namespaces with addresses of their own, behind one bridge.

Each "host" also has its own process ids and its own name while something runs in it, so that nothing works by accident
because two hosts are one. They share the file system, as hosts of a cluster do. Needs root.
"""

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.checkout import ROOT, environment

RSH = """\
#!/bin/sh
# rsh ADDRESS COMMAND-LINE: what ssh is to real hosts. --kill-child: who loses the first process loses the host.
last=${{1##*.}}
ip netns exec {prefix}$last unshare --uts --pid --fork --mount-proc --kill-child \\
  sh -c 'hostname "$1"; exec sh -c "$2"' sh {name}$last "$2"
code=$?
# A connection to a host without power hangs.
[ -e {directory}/lost-$last ] && exec sleep 1000
exit $code
"""

_NUMBERS = itertools.count()


class Hosts:
    """`count` hosts at 10.88.N.1, 10.88.N.2, ...; `close` removes them and everything that runs in them."""

    def __init__(self, count: int, directory: Path) -> None:
        # The kernel removes the links of earlier hosts some time after their namespaces.
        number = next(_NUMBERS)
        own = f"{os.getpid() % 10000}{chr(ord('a') + number % 26)}"
        self.prefix, self.bridge = f"mrl{own}-", f"mrlb{own}"
        self.count = count
        self.subnet = f"10.88.{(os.getpid() + number) % 254}"
        self.name = "host"
        self.directory = directory
        self.rsh = directory / "rsh"
        self.rsh.write_text(RSH.format(prefix=self.prefix, name=self.name, directory=directory))
        self.rsh.chmod(0o755)
        self._namespaces: list[str] = []

    @property
    def addresses(self) -> list[str]:
        return [f"{self.subnet}.{i}" for i in range(1, self.count + 1)]

    def open(self) -> None:
        _ip(f"link add {self.bridge} type bridge")
        _ip(f"link set {self.bridge} up")
        for i, address in enumerate(self.addresses, start=1):
            space, outer = f"{self.prefix}{i}", f"{self.bridge}{i}"
            _ip(f"netns add {space}")
            self._namespaces.append(space)
            _ip(f"link add {outer} type veth peer name eth0 netns {space}")
            _ip(f"link set {outer} master {self.bridge} up")
            for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip(f"-n {space} {command}")

    def everything(self) -> list[psutil.Process]:
        """Everything that runs on any host."""
        return [each for index in range(self.count) for each in self.processes(index)]

    def processes(self, index: int) -> list[psutil.Process]:
        """Everything that runs on host `index` (from 0), as seen from outside."""
        pids = subprocess.run(
            ["ip", "netns", "pids", f"{self.prefix}{index + 1}"], capture_output=True, text=True, check=True, timeout=20
        ).stdout.split()
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def call(self, index: int, *command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command on host `index` alongside its node's agent: with its processes, network, mounts and name."""
        agents = [each for each in self.processes(index) if "megarl.cluster.nodes.launcher" in each.cmdline()]
        enter = ["nsenter", "--target", str(agents[0].pid), "--mount", "--uts", "--net", "--pid"]
        return subprocess.run(
            [*enter, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=environment() | {"PYTHON": sys.executable},
            cwd=ROOT,
        )

    def lose(self, index: int) -> None:
        """Power off: the cable first, then every process at once; who talks to it from outside hears nothing."""
        (self.directory / f"lost-{index + 1}").touch()
        _ip(f"link set {self.bridge}{index + 1} down")
        self._kill(index)

    def revive(self, index: int) -> None:
        """Power on, with the cable: nothing runs there."""
        (self.directory / f"lost-{index + 1}").unlink()
        _ip(f"link set {self.bridge}{index + 1} up")

    def cut(self, index: int) -> None:
        """Pull the cable at the switch: packets to and from the host are lost, and neither side is notified."""
        _ip(f"link set {self.bridge}{index + 1} nomaster")

    def mend(self, index: int) -> None:
        """Put the cable back."""
        _ip(f"link set {self.bridge}{index + 1} master {self.bridge}")

    def _kill(self, index: int) -> None:
        for process in self.processes(index):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def close(self) -> None:
        with contextlib.ExitStack() as rest:  # each is tried, whatever has become of the others
            rest.callback(_ip, f"link delete {self.bridge}")
            for index, space in enumerate(self._namespaces):
                rest.callback(_ip, f"netns delete {space}")
                rest.callback(self._kill, index)


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *shlex.split(arguments)], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {arguments}: {done.stderr.strip()}")
