"""After a stop signal torchrun waits as long as its ranks have told, and no longer than its own bound otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from megarl.cluster.nodes import torchrun_end
from megarl.cluster.nodes.rendezvous_mark import CHOSEN_VARIABLE
from megarl.common.bound_store import serve_store
from megarl.common.signed_values import sign
from tests.support.checkout import ROOT, environment

# torchrun whose default is 1 s instead of 30 s, as an agent has it from its config.
TORCHRUN = """
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.run import main

made = local_elastic_agent.LocalElasticAgent.__init__

def make(self, *arguments, **options):
    made(self, *arguments, **options | {"shutdown_timeout": 1})

local_elastic_agent.LocalElasticAgent.__init__ = make
main()
"""
RANK = """
import os, pathlib, signal, sys, time
from megarl.cluster.nodes.torchrun_end import tell_seconds_to_stop

def save(number, frame):
    time.sleep(float(sys.argv[3]))
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
if sys.argv[2] == "tells":
    tell_seconds_to_stop(os.environ, 240, 60.0)
pathlib.Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "takes_s", "saves"), [("tells", 5, True), ("is silent", 90, False)])
def test_a_save_after_a_stop_signal_is_not_cut(tmp_path: Path, what: str, takes_s: int, saves: bool) -> None:
    """A save of 5 s is not, with a bound of 1 s, by ranks that have told more; one that nobody was told of is."""
    program, script = tmp_path / "torchrun.py", tmp_path / "rank.py"
    program.write_text(TORCHRUN)
    script.write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, str(program), "--rdzv-backend", "megarl", str(script), str(tmp_path), what, str(takes_s)],
        cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (tmp_path / "ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=300)
    assert (tmp_path / "ready").exists() and (tmp_path / "saved").exists() == saves, told


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store that the torchrun of this process serves; a rank finds it by the variables that are set."""
    served = serve_store("127.0.0.1", 0, 10.0)
    monkeypatch.setenv(torchrun_end.KEY_VARIABLE, "ab" * 32)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    monkeypatch.setattr(torchrun_end, "_stores", [served])
    return served


def bound(*signals: signal.Signals, own: int = 30) -> int:
    """The seconds that an agent waits for its ranks, whose own bound is `own`."""
    waits: list[int] = []
    agent: Any = object.__new__(LocalElasticAgent)
    agent._worker_watchdog = agent._health_check_server = None
    agent._pcontext = SimpleNamespace(close=lambda number, timeout: waits.append(timeout))
    torchrun_end._patiently(agent, *signals, timeout=own)
    return waits[0]


def test_only_the_first_signal_is_answered_within_the_told_seconds(store: TCPStore) -> None:
    """After a failure, and after a second signal, torch calls it without a signal."""
    assert bound(signal.SIGTERM) == 30, "the ranks have told nothing yet"
    torchrun_end.tell_seconds_to_stop(os.environ, 2100, 10.0)
    assert bound(signal.SIGTERM) == 2100 and bound() == 30
    assert bound(signal.SIGTERM, own=4000) == 4000
    torchrun_end.tell_seconds_to_stop(os.environ, 10**9, 10.0)
    assert bound(signal.SIGTERM) == torchrun_end.MOST_S


def test_what_no_rank_has_signed_is_not_believed(store: TCPStore) -> None:
    for value in ("2100", sign(b"another key", torchrun_end._NAME, "2100")):
        store.set(torchrun_end._NAME, value)
        assert bound(signal.SIGTERM) == 30


@pytest.mark.parametrize("name", ["TORCHELASTIC_USE_AGENT_STORE", torchrun_end.KEY_VARIABLE])
def test_another_torchrun_is_told_nothing(store: TCPStore, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    torchrun_end.tell_seconds_to_stop(os.environ, 2100, 10.0)
    assert not store.check([torchrun_end._NAME])


@pytest.mark.parametrize(
    ("arguments", "environment", "chosen"),
    [
        (["torchrun", "--rdzv-backend", "megarl", "train.py"], {}, None),
        (["torchrun", "--shutdown-timeout", "5", "train.py"], {"PET_SHUTDOWN_TIMEOUT": "7"}, 5),
        (["torchrun", "--shutdown_timeout=5", "train.py"], {}, 5),
        (["torchrun", "train.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 5),
        (["torchrun", "train.py"], {"PET_SHUTDOWN_TIMEOUT": "5", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 5),
    ],
)
def test_a_time_out_of_the_user_holds(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], chosen: int | None
) -> None:
    """Its ranks see how long it is."""
    assert torchrun_end.chosen_seconds(arguments, environment) == chosen
    monkeypatch.setattr(sys, "argv", arguments)
    for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", CHOSEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(torchrun_end.KEY_VARIABLE, "")  # removed after the test
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", LocalElasticAgent._shutdown)
    torchrun_end.wait_for_ranks()
    assert (LocalElasticAgent._shutdown is torchrun_end._patiently) == (chosen is None)
    assert os.environ.pop(CHOSEN_VARIABLE, None) == (None if chosen is None else str(chosen))
