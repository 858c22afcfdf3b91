"""Rank, size and meeting point of `megarl doctor --nodes` from the environment of torchrun and of `srun`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.commands.doctor.members import FIRST_PORT, PORTS, Member, this_member
from megarl.common.errors import ConfigError

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}


def test_under_torchrun() -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert this_member({**environment, **SLURM, "SLURM_STEP_NODELIST": "n1"}) == Member(1, 4, 1, "a", 29501)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's answers for the list n[4-6]; its nodes have addresses other than their names."""
    script = tmp_path / "scontrol"
    script.write_text("""#!/bin/sh
case "$*" in
"show hostnames n[4-6]") printf "n4\\nn5\\nn6\\n" ;;
"--oneliner show node n4") echo "NodeName=n4 CPUTot=2 NodeAddr=10.1.0.4 NodeHostName=x" ;;
*) exit 1 ;;
esac
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("scontrol")
def test_under_srun() -> None:
    member = this_member({**SLURM, "SLURM_STEP_NODELIST": "n[4-6]"})
    assert (member.rank, member.size, member.local, member.host) == (3, 8, 1, "10.1.0.4")
    assert FIRST_PORT <= member.port < FIRST_PORT + PORTS
    other = this_member({**SLURM, "SLURM_STEP_NODELIST": "n[4-6]", "SLURM_STEP_ID": "3"})
    assert other.port != member.port


@pytest.mark.usefixtures("scontrol")
def test_slurm_that_does_not_answer() -> None:
    with pytest.raises(ConfigError, match="scontrol show hostnames gone"):
        this_member({**SLURM, "SLURM_STEP_NODELIST": "gone"})


def test_started_by_neither() -> None:
    with pytest.raises(ConfigError, match="srun --ntasks-per-node=1 megarl doctor --nodes"):
        this_member({"RANK": "1"})
