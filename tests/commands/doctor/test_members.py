"""Rank, size and meeting point of `megarl doctor --nodes` from the environment of torchrun and of `srun`."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl.cluster.nodes.rendezvous_mark import SERVED_BY_VARIABLE
from megarl.commands.doctor.members import FIRST_PORT, PORTS, Member, this_member
from megarl.common.errors import ConfigError
from tests.support.checkout import ROOT

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
AGENT = {
    **TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0",
    "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
# What the rendezvous `megarl` asks for on several nodes.
NEEDED = ("MEGARL_RUN_DIR=", "torchrun --rdzv-backend megarl ", "--rdzv-endpoint ", "--local-addr ")


def test_under_torchrun() -> None:
    assert this_member({**TORCHRUN, **SLURM, "SLURM_STEP_NODELIST": "n1"}) == Member(1, 4, 1, "a", 29501)


def test_under_torchrun_rank_0_tells_in_the_agents_store_where_its_own_is() -> None:
    member = this_member({**AGENT, "GROUP_WORLD_SIZE": "2", SERVED_BY_VARIABLE: str(os.getppid())})
    assert member == Member(1, 4, 1, "a", 29500, "doctor/x/0")
    assert this_member({**AGENT, "GROUP_WORLD_SIZE": "1"}) == Member(1, 4, 1, "a", 29500, "doctor/x/0", one_host=True)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"GROUP_WORLD_SIZE": "1"}, False),
        ({"GROUP_WORLD_SIZE": "2"}, True),
        ({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"GROUP_WORLD_SIZE": "2", SERVED_BY_VARIABLE: "1"}, True),  # of another torchrun
        ({"GROUP_WORLD_SIZE": "2", SERVED_BY_VARIABLE: str(os.getppid())}, False),
    ],
)
def test_a_torchrun_over_several_hosts_whose_store_is_open_is_refused(changes: dict[str, str], refused: bool) -> None:
    with pytest.raises(ConfigError, match=r"run code as you \(SECURITY\.md\)") if refused else nullcontext() as caught:
        this_member({**AGENT, **changes})
    if caught is not None:
        told = str(caught.value)
        assert all(part in told for part in NEEDED) and "--rdzv-endpoint a:29400" in told
        assert "--nnodes 2 --nproc-per-node 2 " in told and told.endswith("-m megarl doctor --nodes")


def test_the_documented_command_is_one_that_is_not_refused() -> None:
    text = (ROOT / "docs" / "install.md").read_text().replace("\\\n", " ")
    starts = [line for line in text.splitlines() if re.search(r"torchrun .*doctor --nodes", line)]
    assert starts and all(part in line for line in starts for part in NEEDED), starts


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
    assert member.others == ("n5", "n6") and not member.one_host
    other = this_member({**SLURM, "SLURM_STEP_NODELIST": "n[4-6]", "SLURM_STEP_ID": "3"})
    assert other.port != member.port


def test_under_srun_on_one_node_it_is_loopback() -> None:
    member = this_member({**SLURM, "SLURM_STEP_NODELIST": "n4", "SLURM_STEP_NUM_NODES": "1"})
    assert member.host == "127.0.0.1" and member.one_host


@pytest.mark.usefixtures("scontrol")
def test_slurm_that_does_not_answer() -> None:
    with pytest.raises(ConfigError, match="scontrol show hostnames gone"):
        this_member({**SLURM, "SLURM_STEP_NODELIST": "gone"})


def test_started_by_neither() -> None:
    with pytest.raises(ConfigError, match="srun --ntasks-per-node=1 megarl doctor --nodes") as caught:
        this_member({"RANK": "1"})
    assert all(part in str(caught.value) for part in NEEDED)
