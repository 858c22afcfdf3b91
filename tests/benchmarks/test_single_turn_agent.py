"""The benchmark of single turns by an agent loop: its order, rows and loop, and that a quick run comes to its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.single_turn_agent as script
from benchmarks.control_plane import Measured
from benchmarks.single_turn_agent import AGENT, AGENTS, PLAIN, order_of, rows_of
from megarl.config.agent_sections import AgentConfig
from megarl.rollout.agents.find_loop import find_loop
from megarl.rollout.agents.single_turn import SingleTurn
from tests.support.checkout import ROOT, environment

LOAD = Measured(2000, 2016.0, 1000.0, {"controller": 0.5, "queue": 0.1, "stand-ins": 7.0}, [])


def test_one_is_the_shipped_loop_and_the_other_one_of_a_user() -> None:
    assert isinstance(find_loop(AgentConfig(**AGENTS[PLAIN])), SingleTurn)
    loop = find_loop(AgentConfig(**AGENTS[AGENT]))
    assert type(loop).__name__ == "OneTurn" and not isinstance(loop, SingleTurn)


def test_neither_is_always_the_first_one() -> None:
    assert [order_of(number) for number in range(3)] == [(PLAIN, AGENT), (AGENT, PLAIN), (PLAIN, AGENT)]


def test_the_median_of_the_rounds_is_judged() -> None:
    def rounds(*rates: float) -> list[dict[str, Measured]]:
        return [{PLAIN: LOAD, AGENT: replace(LOAD, rate=rate, cost_ms={"controller": 0.66})} for rate in rates]

    rate, cost = rows_of(rounds(960.0, 1.0, 2000.0), "2 cores")
    assert (rate.ratio, rate.ok) == (0.96, True) and cost.ratio == pytest.approx(1.1)
    assert rate.details["finished per second, agent"] == [960, 1, 2000]
    assert not rows_of(rounds(940.0, 1.0, 2000.0), "2 cores")[0].ok


@pytest.mark.parametrize(("quick", "status"), [([], 1), (["--quick"], 0)])
def test_a_missed_bound_is_the_exit_status_but_of_a_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[str], status: int
) -> None:
    """Nothing is started here: each measurement is given, with an agent that loses a tenth of the speed."""
    asked: list[str] = []

    def measure(options: argparse.Namespace, directory: Path, *given: Any) -> Measured:
        in_flight, _, agent, run = given
        asked.append(run)
        assert agent == AGENTS[run.partition("-")[0]]
        return replace(LOAD, wanted=in_flight, rate=900.0 if run.startswith(AGENT) else 1000.0)

    output = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["single_turn_agent.py", "--json", str(output), *quick])
    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "start_ray", lambda directory: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr("megarl.quickstart.build.build_assets", lambda *given, **named: True)
    for variable in ("PYTHONPATH", "OMP_NUM_THREADS"):  # which main changes
        monkeypatch.setenv(variable, os.environ.get(variable, "1"))
    assert script.main() == status
    assert len(asked) == len(set(asked)) == (2 if quick else 10)
    assert [row["ok"] for row in json.loads(output.read_text())] == ([None] * 2 if quick else [False, True])


def test_the_loop_makes_the_trajectory_of_one_turn() -> None:
    from megarl.queue.trajectory import VersionSpan
    from megarl.rewards.types import RewardOutcome
    from megarl.rollout.requests import GenerateResult

    result = GenerateResult("r", [7, 8], [-0.5, -0.25], (VersionSpan(3, 0, 2),), "stop", 0)

    async def give(value: Any) -> Any:
        return value

    ctx: Any = SimpleNamespace(
        group_id=4, sample_index=1, prompt=SimpleNamespace(ids=[5]), generate=lambda ids: give(result),
        judge=lambda found, turns: give(RewardOutcome(1.0, {})),
    )  # fmt: skip
    row: Any = asyncio.run(script.OneTurn().run(ctx))
    assert (row.prompt_ids, row.response_ids, row.reward, row.status) == ([5], [7, 8], 1.0, "ok")


@pytest.mark.slow  # it starts two pools
def test_a_quick_run_comes_to_its_end(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    line = [sys.executable, "benchmarks/single_turn_agent.py", "--quick", "--json", str(output)]
    done = subprocess.run(line, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads(output.read_text())
    assert len(rows) == 2 and {row["ok"] for row in rows} == {None} and all(row["ratio"] > 0 for row in rows)
