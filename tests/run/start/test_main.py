"""The mistakes that are refused before a run begins, and the config that its parts get."""

import io
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megarl import platforms
from megarl.cluster.torchrun import SERVED_BY_VARIABLE, rendezvous
from megarl.common.process import processes
from megarl.common.rundir.run_files import read_exit
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE
from megarl.common.values import GIB
from megarl.config.loading.load import load_config
from megarl.config.memory_plan.memory import Memory
from megarl.config.memory_plan.plan import make_plan
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.platforms import Platform
from megarl.run.loop import stop
from megarl.run.ranks import control_group, watch
from megarl.run.start import main
from tests.support.trainer.configs import config


def test_a_bare_torchrun_does_not_start_several_nodes() -> None:
    with pytest.raises(ValueError, match="needs 4 nodes, which a bare torchrun does not start"):
        main._check_launch(4, 2, Path("run"))


def test_a_host_that_cannot_hold_the_parked_ranks_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{150 * GIB}\n")
    monkeypatch.setattr(main, "CONTAINER_LIMIT", limit)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2000 * GIB))
    shared = SharedMemory(Memory((), None), host=19 * GIB, parked=0, asleep=0)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "0")
    main._check_host_memory(shared, 7)
    with pytest.raises(ValueError, match=r"8 parked ranks keep 152\.0 GiB in host memory, and .* has 150\.0 GiB"):
        main._check_host_memory(shared, 8)
    assert "8 parked ranks" in capsys.readouterr().err, "rank 0 may be on a larger host"
    limit.write_text("max\n")
    main._check_host_memory(shared, 105)
    with pytest.raises(ValueError, match=r"has 2000\.0 GiB"):
        main._check_host_memory(shared, 106)


class Stopped(Exception):
    """Ends a start when it has come far enough."""


@pytest.mark.parametrize(("launch_id", "index", "shares"), [(None, 6, False), ("launch-1", 1, True)])
def test_a_rank_chooses_its_gpu_before_it_joins_its_peers(
    monkeypatch: pytest.MonkeyPatch, launch_id: str | None, index: int, shares: bool
) -> None:
    """A rank alone sees all GPUs of the host; a node's agent shows its ranks those of the trainer only.

    Engines on its GPU could not map memory whose segments grow.
    """
    order: list[Any] = []

    def join(backend: str, timeout_s: float, run_dir: Path) -> None:
        order.append(f"joins over {backend}")
        raise Stopped

    def activate(index: int, *, expandable: bool) -> Platform:
        assert expandable is not shares
        order.append(index)
        return Platform(torch.device("cuda"), True, "nccl")

    monkeypatch.setenv("RANK", "3")  # rank 0 also launches the pool
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    if launch_id is not None:
        monkeypatch.setenv(LAUNCH_ID_VARIABLE, launch_id)
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    monkeypatch.setattr(control_group, "join_peers", join)
    monkeypatch.setattr(platforms, "activate", activate)
    monkeypatch.setattr(main, "StopSignals", lambda *_, **__: SimpleNamespace(install=lambda: order.append("signals")))
    chosen = config("model", rollout={"share_gpus": shares})
    plan: Any = SimpleNamespace(pools=SimpleNamespace(trainer=SimpleNamespace(devices=(4, 6))))
    with pytest.raises(Stopped):
        main._train(chosen, chosen, plan, io.StringIO(), lambda error: None)
    assert order == ["signals", index, "joins over nccl"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_tells_torchrun_how_long_a_step_and_a_save_may_take(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Otherwise torchrun kills the ranks 30 s after a stop signal, in the middle of a save."""
    reported: list[int] = []

    def begin_events(*_: object) -> None:
        raise Stopped

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    monkeypatch.setattr(control_group, "join_peers", lambda *_: ("here", 1))
    monkeypatch.setattr(platforms, "activate", lambda index, **_: Platform(torch.device("cpu"), False, "gloo"))
    monkeypatch.setattr(rendezvous, "request_seconds_to_stop", lambda environment, seconds, _: reported.append(seconds))
    monkeypatch.setattr(main, "StopSignals", lambda *_, **__: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(main, "_launch_pool", lambda *arguments: None)
    monkeypatch.setattr(main, "begin_events", begin_events)
    chosen = config("model", launch={"stop_before_s": 77})
    plan: Any = SimpleNamespace(pools=SimpleNamespace(trainer=SimpleNamespace(devices=(0, 1))), shared=None)
    with pytest.raises(Stopped):
        main._train(chosen, chosen, plan, io.StringIO(), lambda error: None)
    assert reported == ([77] if rank == 0 else [])


def test_what_ends_the_training_is_reported_before_the_session_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a session closes, other ranks that have ended may be missed, and taken for the cause."""
    order: list[Any] = []

    def train(session: object) -> None:
        raise Stopped("the pool cannot be reached")

    monkeypatch.setenv("RANK", "1")  # rank 0 also launches the pool
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    monkeypatch.setattr(control_group, "join_peers", lambda *_: ("here", 1))
    monkeypatch.setattr(platforms, "activate", lambda index, **_: Platform(torch.device("cpu"), False, "gloo"))
    monkeypatch.setattr(main, "StopSignals", lambda *_, **__: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(main, "begin_events", lambda *_: None)
    monkeypatch.setattr(watch, "watch_ranks", lambda *_: SimpleNamespace(follow=lambda step: None))
    recorder = SimpleNamespace(show_notices=lambda: order.append("notices"))
    session = SimpleNamespace(close=lambda keep_pool: order.append("closes"), recorder=recorder)
    monkeypatch.setattr("megarl.run.loop.session.Session", lambda *_: session)
    monkeypatch.setattr("megarl.run.loop.loop.train", train)
    chosen = config("model")
    plan: Any = SimpleNamespace(pools=SimpleNamespace(trainer=SimpleNamespace(devices=(0, 1))), shared=None)
    with pytest.raises(Stopped):
        main._train(chosen, chosen, plan, io.StringIO(), lambda error: order.append(str(error)))
    assert order == ["notices", "the pool cannot be reached", "closes"], "a notice may tell the cause"


def test_ranks_and_replays_get_what_auto_stands_for_and_the_pool_the_launchs_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Path(__file__).parents[3] / "examples/rl/models/Qwen3-8B"
    chosen = config(shape, run__dir=str(tmp_path), trainer__micro_batch_tokens="auto")
    plan = make_plan(chosen, device="cpu", files=False)
    resolved = chosen.trainer.model_copy(update={"recompute": "none", "micro_batch_tokens": 8192})
    assert plan.config == chosen.model_copy(update={"trainer": resolved})
    trained: list[Any] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(main, "redirect_output", lambda file: io.StringIO())
    monkeypatch.setattr(main, "_take_over", lambda config: None)
    monkeypatch.setattr(main, "_train", lambda *arguments: trained.extend(arguments[:2]) or 0)
    assert main.run(chosen, plan) == 0
    assert trained == [chosen, plan.config]
    assert load_config(tmp_path / "config.yaml", []) == plan.config


def test_a_second_start_says_where_the_results_of_the_first_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without a checkpoint starts again, and its directory may hold hours of results."""
    shape = Path(__file__).parents[3] / "examples/rl/models/Qwen3-8B"
    chosen = config(shape, run__dir=str(tmp_path))
    plan = make_plan(chosen, device="cpu", files=False)
    terminal = io.StringIO()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    monkeypatch.setattr(main, "redirect_output", lambda file: terminal)
    monkeypatch.setattr(main, "_train", lambda *arguments: 0)
    assert main.run(chosen, plan) == 0 and terminal.getvalue() == ""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main.run(chosen, plan) == 0
    moved = tmp_path / "previous" / "1"
    assert terminal.getvalue() == f"megarl: the results of an earlier run in {tmp_path} are moved to {moved}\n"
    assert (moved / "metrics.jsonl").read_text() == '{"step": 1}\n' and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("rank", "served", "notices"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_the_first_rank_says_once_if_torchruns_stores_are_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, served: bool, notices: int
) -> None:
    """The run begins all the same."""
    code, reported = start_under_torchrun(monkeypatch, capsys, rank=rank, served=served)
    assert code == 0
    said = [line for line in reported.splitlines() if "listens on all interfaces" in line]
    assert len(said) == notices
    assert all(line.endswith("--rdzv-backend megarl --nproc-per-node 2 train_rl.py --config C") for line in said)


@pytest.mark.parametrize(("rank", "launch", "tells"), [(0, False, True), (1, False, False), (0, True, False)])
def test_a_rank_tells_of_stop_signals_unless_a_launch_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rank: int, launch: bool, tells: bool,
) -> None:  # fmt: skip
    """The agent of a launch sends a signal to end a rank at once, and says why; a rank's own words would be another."""
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    variables = {LAUNCH_ID_VARIABLE: "a"} if launch else {}
    _, reported = start_under_torchrun(monkeypatch, capsys, rank=rank, served=True, variables=variables)
    assert f"tells of signals: {tells}\n" in reported
    monkeypatch.setattr(stop, "REPORT_S", 0.0)
    monkeypatch.setattr(stop.os, "_exit", lambda code: None)
    terminal = io.StringIO()
    signals = stop.StopSignals(tmp_path, tmp_path / "checkpoints", terminal, speaks=main._reports_signals(rank))
    signals.receive(signal.SIGTERM)
    assert ("SIGTERM while the run was starting" in terminal.getvalue()) == tells
    assert (read_exit(tmp_path) is not None) == tells


def start_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, rank: int = 0, served: bool,
    variables: Mapping[str, str] | None = None,
) -> tuple[Any, str]:  # fmt: skip
    """Start a rank of two that does nothing; return its exit status and what it has printed."""
    started = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "none"}
    started |= variables or {}
    started |= {SERVED_BY_VARIABLE: os.getppid()} if served else {}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(main, "load_config", lambda path, overrides: config("model", trainer={"gpus": 2}))
    monkeypatch.setattr(main, "make_plan", lambda config: SimpleNamespace(pools=SimpleNamespace(nodes=1), shared=None))
    monkeypatch.setattr(main, "already_finished", lambda config: None)
    monkeypatch.setattr(main, "is_checked", lambda environment: True)
    monkeypatch.setattr(main, "claim_for_ranks", lambda run_dir, node_s, rank, force: None)
    monkeypatch.setattr(main, "end_before_start", lambda speaks: sys.stderr.write(f"tells of signals: {speaks}\n"))
    monkeypatch.setattr(main, "run", lambda config, plan, claim: 0)
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--config", "C"])
    with pytest.raises(SystemExit) as end:
        main.main(["--config", "C"])
    return end.value.code, capsys.readouterr().err
