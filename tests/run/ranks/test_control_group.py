"""Ranks that torchrun starts again find each other, and not the addresses of the dead."""

import json
import pickle
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from megarl.common.errors import NotAuthentic
from megarl.common.trust.object_guard import FailurePickler, GuardedUnpickler
from megarl.common.trust.run_secret import run_secret
from megarl.common.trust.signed_store import serve_store, sign, verify
from megarl.run.ranks.control_group import _own_store, join_peers
from tests.support.checkout import environment, torchrun

# The killed rank 0 comes late to the second attempt, so that rank 1 is the first to look for it.
RANK = """
import os, sys, time
import torch
from pathlib import Path
from megarl.run.ranks.control_group import join_peers
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if (attempt, rank) == ("1", "0"):
    time.sleep(2)
join_peers("gloo", 60, Path(sys.argv[1]))
torch.distributed.barrier()
if (attempt, rank) == ("0", "0"):
    os.kill(os.getpid(), 9)
torch.distributed.barrier()
with open(f"{sys.argv[1]}/{attempt}.{rank}", "w"):
    pass
"""


@pytest.mark.slow
def test_restarted_ranks_find_their_peers(tmp_path: Path) -> None:
    """With `init_process_group("gloo")` in its place rank 1 calls the dead rank 0 and fails (torch 2.13)."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    command = torchrun(2, "--max-restarts", "3", str(program), str(tmp_path))
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("*.?")) == ["1.0", "1.1"]


# Rank 1 does not come.
WAITING = """
import os, sys, time
from pathlib import Path
import torch
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks.control_group import ControlGroup, join_peers
rank = os.environ["RANK"]
join_peers("gloo", 60, Path(sys.argv[1]))
peers = ControlGroup(TimeoutsConfig())
peers.await_all("meet", 60.0, "timeouts.rpc_s")
if rank == "1":
    time.sleep(600)
try:
    peers.await_all("let go of the GPUs", 1.0, "timeouts.rpc_s", ["1 GiB", "2 GiB", "3 GiB"])
except RuntimeError as error:
    Path(sys.argv[1], rank).write_text(f"{type(error).__name__}: {error}")
if rank == "0":
    time.sleep(600)  # until the others have written; torchrun then ends both
while not Path(sys.argv[1], "0").exists():
    time.sleep(0.1)
raise SystemExit(3)
"""


def test_a_rank_that_does_not_come_is_named_by_the_first_one(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(WAITING)
    result = subprocess.run(
        torchrun(3, str(program), str(tmp_path)), env=environment(), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode != 0 and not (tmp_path / "1").exists()
    late = "trainer rank 1 (which held 2 GiB) to let go of the GPUs"
    assert (tmp_path / "0").read_text() == f"PeerTimeout: trainer rank 0 waited 1 s (timeouts.rpc_s) for {late}"
    assert (tmp_path / "2").read_text().startswith("PeerFailedError: a rank has failed that was to let go of the GPUs")


HOST, NAME, SECRET = "127.0.0.1", "store of the ranks/a-run", b"s" * 32


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment in which `megarl launch` lets agents start ranks; the port is set by each test."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    return monkeypatch


def test_ranks_of_a_launch_share_the_store_that_rank_0_has_signed(launched: pytest.MonkeyPatch) -> None:
    with_free_port = serve_store(HOST, 0, 5.0)
    launched.setenv("MASTER_PORT", str(with_free_port.port))
    del with_free_port  # it closes its port
    first = _own_store(0, 5.0, SECRET)
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # another agent's ranks have failed and been started again
    second = _own_store(1, 5.0, SECRET)
    first.set("a", "b")
    assert second.get("a") == b"b"


def test_ranks_guard_their_object_collectives_before_they_join(launched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_free_port = serve_store(HOST, 0, 5.0)
    for name, value in (("MASTER_PORT", with_free_port.port), ("RANK", 0), ("WORLD_SIZE", 3)):
        launched.setenv(name, str(value))
    del with_free_port  # it closes its port
    joined: list[dict[str, Any]] = []

    def join(backend: str, **options: Any) -> None:
        assert (distributed_c10d._unpickler, distributed_c10d._pickler) == (GuardedUnpickler, FailurePickler)
        joined.append({"backend": backend, **options})

    launched.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)  # undone after the test
    launched.setattr(distributed_c10d, "_pickler", pickle.Pickler)
    launched.setattr(torch.distributed, "init_process_group", join)
    join_peers("gloo", 5.0, tmp_path)
    [options] = joined
    assert verify(run_secret(tmp_path), NAME, options.pop("store").get(NAME))
    assert options == {"backend": "gloo", "rank": 0, "world_size": 3, "timeout": timedelta(seconds=5)}


@pytest.mark.parametrize("case", ["unsigned", "another secret", "another run", "another address"])
def test_ranks_use_no_store_of_a_stranger(case: str, launched: pytest.MonkeyPatch) -> None:
    """An address in the rendezvous store is not signed: a stranger can lead a rank to a store of its own."""
    stranger = serve_store(HOST, 0, 5.0)
    launched.setenv("MASTER_PORT", str(stranger.port))
    here, elsewhere = (json.dumps([HOST, port]) for port in (stranger.port, stranger.port - 1))
    values = {
        "unsigned": here,
        "another secret": sign(b"t" * 32, NAME, here),
        "another run": sign(SECRET, "store of the ranks/b-run", here),
        "another address": sign(SECRET, NAME, elsewhere),
    }
    stranger.set(NAME, values[case])
    message = "rank 0 serves it at" if case == "another address" else "was not written by a process of this run"
    with pytest.raises(NotAuthentic, match=message):
        _own_store(1, 5.0, SECRET)
