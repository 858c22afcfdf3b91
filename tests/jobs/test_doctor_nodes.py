"""`megarl doctor --nodes` under a real `srun`, and under torchrun on hosts of their own: one process per node."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, environment
from tests.support.runs.hosts import Hosts
from tests.support.runs.slurm import Slurm

pytestmark = pytest.mark.cluster


def test_doctor_under_srun(slurm: Slurm, tmp_path: Path) -> None:
    torchrun = (
        f"exec {shlex.quote(sys.executable)} -m megarl.cluster.torchrun.run --rdzv-backend megarl --nnodes 2 "
        "--nproc-per-node 1 --rdzv-endpoint 127.0.0.1:29433 --local-addr 127.0.0.1 --rdzv-conf "
        "is_host=$([ $SLURM_PROCID = 0 ] && echo true || echo false) "
        "-m megarl doctor --nodes --json --mib 1 --timeout 45"
    )
    text = slurm.run(
        "srun", "--nodes=2", "--ntasks-per-node=1", "--chdir", str(ROOT), "bash", "-c", torchrun,
        **environment(MEGARL_RUN_DIR=str(tmp_path)),
    )  # fmt: skip
    report = json.loads(text[text.index("{") :])
    assert sorted(report["nodes"]) == ["n1", "n2"] and report["can_start"]
    assert report["paths"][0]["gb_per_second"].keys() == {
        "all-reduce", "broadcast from node 0", "broadcast from node 1",
    }  # fmt: skip


def test_doctor_under_torchrun_on_two_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    """The documented command. The hosts' names are in no list of names, so it says which of them is the first."""
    first, _ = two_hosts.addresses
    processes = [
        subprocess.Popen(
            [two_hosts.rsh, address, shlex.join([
                sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "megarl", "--nnodes", "2",
                "--nproc-per-node", "1", "--rdzv-endpoint", f"{first}:29400", "--rdzv-conf",
                f"is_host={'true' if address == first else 'false'}", "--local-addr", address, "-m", "megarl", "doctor",
                "--nodes", "--json", "--mib", "1", "--timeout", "60",
            ])],
            env=environment(MEGARL_RUN_DIR=str(tmp_path / "run")), cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for address in two_hosts.addresses
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    report = json.loads("".join(reported for reported, _ in outputs))
    assert sorted(report["nodes"]) == ["host1", "host2"] and report["can_start"], report
    assert report["paths"][0]["path"] == "gloo on eth0"
