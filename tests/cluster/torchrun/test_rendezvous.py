"""torchrun's rendezvous `megarl`: bound to one address, its state signed, and found by torchrun.

Forged states are in tests/security.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from megarl.cluster.torchrun import NAME, SERVED_BY_VARIABLE
from megarl.cluster.torchrun.rendezvous import SignedBackend, open_rendezvous
from megarl.common.trust.run_secret import RUN_DIR_VARIABLE
from tests.support.attacks.attack import addresses, attack
from tests.support.checkout import ROOT, environment

KEY = b"secret of the run"


def parameters(endpoint: str, nodes: int = 1, **options: Any) -> RendezvousParameters:
    return RendezvousParameters(NAME, endpoint, "run-7", nodes, nodes, **options)


def test_states_are_compared_and_set_as_in_c10d() -> None:
    store = HashStore()
    one, other = (SignedBackend(store, "run", KEY) for _ in range(2))
    assert one.get_state() is None and one.name == NAME
    state, token, was_set = one.set_state(b"first") or (b"", None, False)
    assert (state, was_set) == (b"first", True) and other.get_state() == (b"first", token)
    assert (other.set_state(b"late") or [None])[0] == b"first", "without the token it is not replaced"
    second = other.set_state(b"second", token)
    assert second is not None and second[0] == b"second" and second[2]
    stale = one.set_state(b"third", token)
    assert stale is not None and stale[0] == b"second" and not stale[2]
    wrong = one.set_state(b"third", 7)
    assert wrong is not None and wrong[0] == b"second" and not wrong[2]


def test_two_agents_meet_on_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(SERVED_BY_VARIABLE, "")
    first = open_rendezvous(parameters("127.0.0.3:0", local_addr="127.0.0.3", is_host="true", last_call_timeout="1"))
    port = first._store.port
    assert addresses(port) == {"127.0.0.3"}
    assert os.environ[SERVED_BY_VARIABLE] == str(os.getpid()), "ranks would say that this start is open to others"
    options = {"endpoint": f"127.0.0.3:{port}", "nodes": 2, "last_call_timeout": "1", "join_timeout": "30"}
    agents = [
        open_rendezvous(parameters(local_addr=f"127.0.0.{number}", is_host="false", **options)) for number in (4, 5)
    ]
    with ThreadPoolExecutor(2) as threads:
        joined = list(threads.map(lambda agent: agent.next_rendezvous(), agents))
    assert sorted(each.rank for each in joined) == [0, 1] and {each.world_size for each in joined} == {2}
    place = joined[0].bootstrap_store_info
    assert place is not None and place.master_addr in {"127.0.0.4", "127.0.0.5"}
    assert addresses(place.master_port) == {place.master_addr}, "the store for the ranks is bound too"
    for agent in agents:
        agent._stop_heartbeats()
        agent._state_holder._cache_duration = 0
    # A stranger can write to the store, but no agent unpickles what it has written.
    state = attack(tmp_path / "ran")
    stranger = C10dRendezvousBackend(TCPStore("127.0.0.3", port, wait_for_workers=False), "run-7")
    found = stranger.get_state()
    assert found is not None and (stranger.set_state(state, found[1]) or [b"", b"", False])[2]
    for agent in agents:
        with pytest.raises(RendezvousStateError):
            agent.is_closed()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"endpoint": "127.0.0.1", "local_addr": "127.0.0.1"}, "--rdzv-endpoint HOST:PORT"),
        ({"endpoint": "127.0.0.1:5"}, "--local-addr with this node's address"),
        ({"endpoint": "127.0.0.1:5", "local_addr": "127.0.0.1"}, "MEGARL_RUN_DIR"),
    ],
)
def test_several_nodes_need_an_endpoint_an_address_and_a_secret(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], missing: str
) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"--rdzv-backend megarl on several nodes also needs {missing}"):
        open_rendezvous(parameters(nodes=2, **options))


RANK = """
import json, os, sys
from pathlib import Path
import psutil, torch
from megarl.run.ranks.control_group import join_peers
join_peers("gloo", 60, Path(sys.argv[1]))
torch.distributed.barrier()
if os.environ["RANK"] == "0":
    processes = [psutil.Process(), psutil.Process().parent()]
    listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
    Path(sys.argv[1], "listening").write_text(json.dumps(sorted(set(listening))))
torch.distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["entry point", "agent"])
def test_torchrun_finds_the_backend_and_nothing_listens_on_all_addresses(tmp_path: Path, by: str) -> None:
    """The entry point is that of an installation, here of a directory on the path; agents start a torchrun of ours."""
    (tmp_path / "rank.py").write_text(RANK)
    module = "megarl.cluster.torchrun.run"
    variables = environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    if by == "entry point":
        module = "torch.distributed.run"
        info = tmp_path / "path" / "megarl_entry-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megarl-entry\nVersion: 0\n")
        text = (ROOT / "pyproject.toml").read_text().partition('entry-points."torchrun.handlers"]\nmegarl = "')[2]
        value = text.partition('"')[0]
        assert EntryPoint("megarl", value, "torchrun.handlers").load()() is not None
        (info / "entry_points.txt").write_text(f"[torchrun.handlers]\nmegarl = {value}\n")
        variables["PYTHONPATH"] = f"{info.parent}{os.pathsep}{variables.get('PYTHONPATH', '')}"
    command = [
        sys.executable, "-m", module, "--nproc-per-node", "2", "--rdzv-backend", "megarl", "--rdzv-endpoint",
        "127.0.0.1:0", str(tmp_path / "rank.py"), str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "listening").read_text() == '["127.0.0.1"]'
