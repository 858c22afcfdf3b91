"""A real SLURM, and hosts of their own, for as long as a test needs them; tests are skipped where neither can be."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository.needs import CLUSTER, need
from tests.support.runs.hosts import Hosts
from tests.support.runs.slurm import Slurm

SYSTEM = f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose fixtures need root, or programs that are not here."""
    names = set(getattr(item, "fixturenames", ()))
    if "slurm" in names:
        _need("a real SLURM", "sbatch", "slurmctld", "slurmd", "munged")
    if names & {"two_hosts", "hosts"}:
        _need("hosts of their own", "ip", "unshare")


def _need(what: str, *programs: str) -> None:
    """Skip the test unless root runs it and the programs are here; fail it then with MEGARL_NEEDS_CLUSTER."""
    os.environ["PATH"] += "" if SYSTEM in os.environ["PATH"] else SYSTEM
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        reason = f"not here: {', '.join(missing)}; run tools/cluster_tools.sh" if missing else "only root may make it"
        need(CLUSTER, f"{what}: {reason}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.open()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Hosts]:
    two = Hosts(2, tmp_path)
    try:
        two.open()
        yield two
    finally:
        two.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    four = Hosts(4, tmp_path)
    try:
        four.open()
        yield four
    finally:
        four.close()
