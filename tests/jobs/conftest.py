"""A real SLURM, and hosts of their own, for as long as a test needs them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.hosts import Hosts
from tests.support.slurm import Slurm

NEEDED = ("sbatch", "slurmctld", "slurmd", "munged", "ip", "unshare")


@pytest.fixture(scope="session", autouse=True)
def tools() -> None:
    """Without them these tests fail, with the reason: a skipped one would look like a passed one."""
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.exit(f"make test-cluster runs as root and needs {', '.join(NEEDED)}; missing: {missing}; see "
                    "tools/cluster_tools.sh", returncode=1)  # fmt: skip


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
