"""An answer that falls into a cut of the network between two hosts is asked for again soon after the cut."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.runs.hosts import Hosts
from tests.support.runs.jobs import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CUT_S = 32  # Ray's server gives a silent connection up after 10 + 20 s
SOON_S = 30  # a probe every 10 s, a retry after 1 s, and the start of a new connection on a busy machine


def test_a_call_whose_answer_is_lost_is_sent_again_soon_after_the_cut(
    two_hosts: Hosts, tmp_path: Path, short_directory: str
) -> None:
    """Without a probe the caller waits until gRPC's keepalive, which comes every 300 s."""
    here, there = two_hosts.addresses
    ray = f"{Path(sys.executable).parent}/ray start --disable-usage-stats --num-cpus 1"
    head = start(
        two_hosts, 1, tmp_path,
        f"exec {ray} --head --block --node-ip-address {there} --port 6379 --resources '{{\"other\": 1}}' "
        f"--include-dashboard false --temp-dir {short_directory}",
    )  # fmt: skip
    # One shell: Ray finds the raylet of its host by its processes.
    caller = start(
        two_hosts, 0, tmp_path,
        f"{ray} --node-ip-address {here} --address {there}:6379 && "
        f"exec {sys.executable} -m tests.support.pool.lost_answer 6 {there}:6379 {here}",
    )  # fmt: skip
    log = tmp_path / "host-0.log"
    try:
        wait_for(lambda: "called" in log.read_text().splitlines(), 600, "the call", log)
        time.sleep(2)
        two_hosts.cut(1)
        time.sleep(CUT_S)
        two_hosts.mend(1)
        assert caller.wait(timeout=400) == 0, log.read_text()[-4000:]
    finally:
        caller.kill()
        head.kill()
    answered = re.search(r"answered after (\d+)\.\d s", log.read_text())
    assert answered is not None and int(answered[1]) <= 2 + CUT_S + SOON_S, log.read_text()[-4000:]


@pytest.fixture
def short_directory() -> Iterator[str]:
    """For Ray's sockets, whose paths may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="mrl-", ignore_cleanup_errors=True) as directory:
        yield directory


def start(hosts: Hosts, index: int, directory: Path, command: str) -> subprocess.Popen[bytes]:
    with (directory / f"host-{index}.log").open("wb") as output:
        return subprocess.Popen(
            [hosts.rsh, hosts.addresses[index], f"cd {ROOT} && {command}"], env=environment(),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
