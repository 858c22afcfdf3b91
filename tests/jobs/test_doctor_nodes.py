"""`megarl doctor --nodes` under a real `srun`: one process per node."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.slurm import Slurm

pytestmark = pytest.mark.cluster


def test_doctor_under_srun(slurm: Slurm) -> None:
    text = slurm.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--chdir", str(ROOT), sys.executable, "-m", "megarl", "doctor",
        "--nodes", "--json", "--mib", "1", "--timeout", "45", **environment(),
    )  # fmt: skip
    report = json.loads(text)
    assert report["nodes"] == ["n1", "n2"] and report["can_start"]
    assert report["paths"][0]["gb_per_second"].keys() == {
        "all-reduce", "broadcast from node 0", "broadcast from node 1",
    }  # fmt: skip
