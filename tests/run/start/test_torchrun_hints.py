"""The commands that the documentation gives keep torchrun's ports closed, and another start is warned once."""

import os
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from megarl.cluster.torchrun import SERVED_BY_VARIABLE
from megarl.run.start.torchrun_hints import (
    SAFE_TORCHRUN,
    notice_of_open_stores,
    refuse_open_stores,
)
from tests.support.checkout import ROOT, environment, torchrun

ARGUMENTS = ["examples/rl/train_rl.py", "--config", "my run.yaml", "trainer.gpus=2"]
STARTED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}


def test_the_notice_has_the_same_command_with_the_safe_rendezvous() -> None:
    notice = notice_of_open_stores(STARTED, ARGUMENTS)
    assert notice is not None and notice.endswith(
        "torchrun --rdzv-backend megarl --nproc-per-node 2 examples/rl/train_rl.py --config 'my run.yaml' "
        "trainer.gpus=2"
    )


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({SERVED_BY_VARIABLE: str(os.getppid())}, False),
        ({SERVED_BY_VARIABLE: "1"}, True),  # of another torchrun, from whose rank this one was started
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_only_the_first_start_by_an_open_torchrun_is_told(changes: dict[str, str], reported: bool) -> None:
    assert (notice_of_open_stores({**STARTED, **changes}, ARGUMENTS) is not None) == reported
    assert notice_of_open_stores({}, ARGUMENTS) is None, "torchrun has not started this process"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "1"}, False),  # torchrun --standalone names the host
        ({"MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "2", SERVED_BY_VARIABLE: str(os.getppid())}, False),
        # Refused at its first start, torchrun --max-restarts starts it again.
        ({"MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
    ],
)
def test_an_open_torchrun_over_several_hosts_is_refused(changes: dict[str, str], refused: bool) -> None:
    with pytest.raises(ValueError, match=r"SECURITY\.md") if refused else nullcontext() as caught:
        refuse_open_stores({**STARTED, **changes}, ARGUMENTS, Path("run"))
    refuse_open_stores({}, ARGUMENTS, Path("run"))  # torchrun has not started this process
    if caught is not None:
        assert "can be reached by other hosts" in str(caught.value)
        assert "--nproc-per-node 2 examples/rl/train_rl.py --config 'my run.yaml' trainer.gpus=2" in str(caught.value)


def test_the_command_for_several_hosts_has_all_that_the_safe_rendezvous_needs() -> None:
    """Otherwise `open_rendezvous` would ask for it."""
    with pytest.raises(ValueError, match=r"SECURITY\.md") as caught:
        refuse_open_stores(
            {**STARTED, "MASTER_ADDR": "10.0.0.7", "GROUP_WORLD_SIZE": "2"}, ARGUMENTS, Path("/runs/a b")
        )
    assert (
        "MEGARL_RUN_DIR='/runs/a b' torchrun --rdzv-backend megarl --nnodes 2 --rdzv-endpoint 10.0.0.7:29400 "
        "--local-addr THIS_NODE'S_ADDRESS --nproc-per-node 2 examples/rl/train_rl.py" in str(caught.value)
    )


PROGRAM = """
import os, sys
from megarl.run.start.torchrun_hints import notice_of_open_stores
if os.environ["RANK"] == "0":
    print("warned" if notice_of_open_stores(os.environ, sys.argv) else "silent")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "said"), [("megarl", "silent"), ("c10d", "warned"), ("static", "warned")])
def test_ranks_know_by_which_rendezvous_torchrun_has_started_them(tmp_path: Path, backend: str, said: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = torchrun(2, str(program))
    place = command.index("megarl")
    endpoint = {"megarl": [], "c10d": ["--rdzv-endpoint", "127.0.0.1:0"], "static": ["--master-port", "0"]}[backend]
    command[place : place + 1] = [backend, *endpoint]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0 and said in done.stdout.splitlines(), done.stdout + done.stderr


def test_the_documented_commands_are_those_of_the_makefile_and_no_training_is_started_by_an_open_torchrun() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target, config in (("quickstart", "quickstart_cpu"), ("agents", "agents_cpu"), ("vision", "vision_cpu")):
        [run] = re.findall(rf"^\t\$\(VENV\)/bin/(torchrun .*{config}.yaml)$", makefile, re.MULTILINE)
        assert run.startswith(f"{SAFE_TORCHRUN} --nproc-per-node 2 examples/rl/train_rl.py"), target
        if target == "quickstart":
            assert run in (ROOT / "docs/quickstart.md").read_text().splitlines()
    pages = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
    starts = [line for page in pages for line in page.read_text().splitlines() if "train_rl.py" in line]
    opened = [line for line in starts if "torchrun" in line and SAFE_TORCHRUN not in line]
    assert len(starts) >= 6 and opened == []
