"""The benchmark of agent loops: its stand-ins, its watch, its load, its rows, and that a quick run comes to its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.agent_loops as script
from benchmarks import agent_loops_parts
from benchmarks.agent_loops import MAX_TOKENS, MeasuredAgents, config_of, rows_of
from benchmarks.agent_loops_parts import (
    LONGEST_TURN,
    SHORTEST_TURN,
    LongestTurn,
    LoopWatch,
    TurnReplica,
    longest_turns,
    seconds_ready,
)
from benchmarks.control_plane import CONTROL_PLANE, Measured, part_of
from benchmarks.control_plane_parts import Response
from megarl.config.pace import pace_problems
from megarl.config.schema import Config
from megarl.rollout.requests import GenerateRequest, SamplingSpec
from tests.support.checkout import ROOT, environment
from tests.support.waiting import wait_until

OPTIONS = argparse.Namespace(groups=25, reward_workers=1, workers=2)


@pytest.mark.parametrize("in_flight", [1000, 10_000])
def test_the_config_of_a_measurement_is_one_of_tool_agents_in_workers(in_flight: int) -> None:
    config = Config.model_validate(config_of(OPTIONS, Path("/x"), in_flight))
    assert list(pace_problems(config)) == []
    assert (config.rollout.agent_workers, config.agent.loop, config.agent.max_turns) == (2, "tool_agent", 2)
    assert 2 * LONGEST_TURN < MAX_TOKENS == config.sampling.max_tokens, "both turns and the tool's answer fit"


def test_a_replica_calls_the_tool_and_then_answers() -> None:
    calls, answers = [Response([1] * LONGEST_TURN, [7, 8])], [Response([2] * LONGEST_TURN, [9])]

    async def scenario() -> None:
        replica = TurnReplica(0, 1e-6, calls + answers)
        spec = SamplingSpec(MAX_TOKENS, 1.0, ())
        requests = [GenerateRequest(f"run-3-{sample}-{turn}", [5], spec) for sample in range(3) for turn in "01"]
        parts = (await replica.generate(requests, 5.0)).parts
        for name, part in parts.items():
            first, end = (1, [7, 8]) if name.endswith("0") else (2, [9])
            assert SHORTEST_TURN <= len(part.response_ids) <= LONGEST_TURN and part.finish_reason == "stop"
            assert part.response_ids[0] == first and part.response_ids[-len(end) :] == end
        renamed = GenerateRequest("run-3-0-1.1", [5], spec)  # after the loss of a worker
        assert (await replica.generate([renamed], 5.0)).parts["run-3-0-1.1"].response_ids[0] == 2

    asyncio.run(scenario())


def test_the_watch_sees_a_turn_that_blocks_and_tells_waiting_from_computing(tmp_path: Path) -> None:
    async def scenario() -> tuple[float, float]:
        watch = LoopWatch(tmp_path, "here")
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        time.sleep(0.4)  # this is what it has to see
        while not list((tmp_path / "turns").glob("here.jsonl")):
            await asyncio.sleep(0.01)
        end = time.monotonic()
        watch._task.cancel()
        return begin, end

    begin, end = asyncio.run(scenario())
    [(name, turn)] = longest_turns(tmp_path, begin, end, ["here"]).items()
    assert name == "here" and turn.wall_s >= 0.38 and turn.cpu_s < 0.3 and turn.ready_s < 0.3
    silent = longest_turns(tmp_path, end + 1, end + 3, ["here"])["here"]
    assert silent.wall_s == pytest.approx(2.0), "a loop that has written nothing was blocked all the time"
    with pytest.raises(FileNotFoundError, match="nobody-there"):
        longest_turns(tmp_path, begin, end, ["here", "nobody-there"])


def test_the_watch_tells_how_long_the_longest_turn_waited_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in tells the waits: 0.2 s in that turn, and nothing later."""
    waits = iter([0.0, 0.2, *[0.2] * 10_000])
    monkeypatch.setattr(agent_loops_parts, "seconds_ready", lambda: lambda: next(waits))
    monkeypatch.setattr(agent_loops_parts, "LINE_S", 0.3)

    async def scenario() -> None:
        watch = LoopWatch(tmp_path, "here")
        await asyncio.sleep(0)
        time.sleep(0.4)
        while not list((tmp_path / "turns").glob("here.jsonl")):
            await asyncio.sleep(0.01)
        watch._task.cancel()

    begin = time.monotonic()
    asyncio.run(scenario())
    turn = longest_turns(tmp_path, begin, time.monotonic(), ["here"])["here"]
    assert turn.wall_s >= 0.3 and turn.ready_s == pytest.approx(0.2)


def test_waiting_for_a_core_is_told_from_waiting_for_anything_else() -> None:
    """Two threads of different processes share one core; then one of them sleeps."""
    cores = os.sched_getaffinity(0)
    one = min(cores)
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{one}}})\nwhile True: pass"])
    try:
        wait_until(lambda: os.sched_getaffinity(busy.pid) == {one}, 30, "the other process")
        os.sched_setaffinity(0, {one})
        waited_s = seconds_ready()
        begin, before = time.monotonic(), waited_s()
        while time.monotonic() < begin + 0.5:
            pass
        assert waited_s() - before > 0.1
    finally:
        os.sched_setaffinity(0, cores)
        busy.kill()
        busy.wait()
    before = waited_s()
    time.sleep(0.5)
    assert waited_s() - before < 0.3


def test_the_workers_are_a_part_whose_cost_counts() -> None:
    assert part_of(["ray::WatchedWorker.take"]) == "workers" in CONTROL_PLANE
    assert part_of(["ray::WatchedController"]) == "controller" and part_of(["ray::TurnReplica"]) == "stand-ins"


LOAD = Measured(1000, 1016.0, 620.0, {"controller": 0.5, "workers": 1.5, "stand-ins": 7.0}, [])
TURNS = {"controller": LongestTurn(1.0, 0.04, 0.03), "worker-0": LongestTurn(1.0, 0.1, 0.09)}


def test_each_bound_can_be_missed() -> None:
    first = {"controller": LongestTurn(0.5, 0.4, 0.1)}

    def missed(turns: dict[str, LongestTurn] = TURNS, **changed: object) -> list[str]:
        most = replace(LOAD, **({"wanted": 10_000, "in_flight": 10_000.0} | changed))
        rows = rows_of([MeasuredAgents(LOAD, {}, {}), MeasuredAgents(most, turns, first)], "2 cores")
        assert rows[-1].ratio == pytest.approx(4.0), "while all begin there is no bound"
        return [row.name.split(",")[0].split(" /")[0] for row in rows if not row.ok]

    assert missed() == []
    assert missed(rate=499.0) == ["rate"]
    assert missed(in_flight=9999.0) == ["in flight"]
    assert missed(cost_ms={"workers": 2.7}) == ["cost"]
    assert missed({**TURNS, "worker-1": LongestTurn(1.0, 0.101, 0.0)}) == ["longest turn"]


@pytest.mark.parametrize(("quick", "status"), [([], 1), (["--quick"], 0)])
def test_a_missed_bound_is_the_exit_status_but_of_a_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[str], status: int
) -> None:
    """Nothing is started here: each measurement is given, with a rate that misses its bound."""
    asked: list[tuple[int, int]] = []

    def measure(options: argparse.Namespace, directory: Path, in_flight: int, trajectories: int) -> MeasuredAgents:
        asked.append((in_flight, trajectories))
        return MeasuredAgents(replace(LOAD, wanted=in_flight, in_flight=float(in_flight), rate=499.0), TURNS, TURNS)

    output = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["agent_loops.py", "--json", str(output), *quick])
    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(script, "start_ray", lambda directory: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr("megarl.quickstart.build.build_assets", lambda *given, **named: True)
    for variable in ("PYTHONPATH", "OMP_NUM_THREADS"):  # which main changes
        monkeypatch.setenv(variable, os.environ.get(variable, "1"))
    assert script.main() == status
    assert asked == ([(64, 160), (128, 320)] if quick else [(1000, 15_000), (10_000, 40_000)])
    rows = json.loads(output.read_text())
    assert [row["ok"] for row in rows] == ([None] * 5 if quick else [False, True, True, True, True])


@pytest.mark.slow  # it starts two pools
def test_a_quick_run_comes_to_its_end(tmp_path: Path) -> None:
    """Every part of it, with the real controller and workers."""
    output = tmp_path / "rows.json"
    line = [sys.executable, "benchmarks/agent_loops.py", "--quick", "--json", str(output)]
    done = subprocess.run(line, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = json.loads(output.read_text())
    assert len(rows) == 5 and {row["ok"] for row in rows} == {None}
    loops = {"controller", "worker-0", "worker-1"}
    assert loops == rows[3]["details"].keys() == rows[4]["details"].keys()
