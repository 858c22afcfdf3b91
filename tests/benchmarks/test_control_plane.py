"""The benchmark of the control plane: its stand-ins, its meter, its load and its results."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.control_plane as script
from benchmarks.control_plane import SAMPLES_PER_GROUP, Measured, Meter, config_of, part_of, rows_of
from benchmarks.control_plane_parts import LONGEST, SHORTEST, Response, TakenBatch, TimedReplica
from megarl.config.pace import pace_of, pace_problems
from megarl.config.schema import Config
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.admission import Admission
from megarl.rollout.requests import GenerateRequest, SamplingSpec
from megarl.rollout.response_parts import EngineReport, join_parts

RESPONSE = Response([1, 2, 3] * LONGEST, [8, 9])
SPEC = SamplingSpec(max_tokens=LONGEST, temperature=1.0, stop_token_ids=())


def test_a_timed_replica_answers_like_an_engine() -> None:
    replica = TimedReplica(1, 1e-9, [RESPONSE])
    requests = [GenerateRequest(f"r{number}", [1], SPEC) for number in range(64)]

    async def ask() -> EngineReport:
        await replica.set_weight_version("3")
        return await replica.generate(requests, 5.0)

    parts = asyncio.run(ask()).parts
    assert list(parts) == [each.request_id for each in requests]
    for each in parts.values():
        assert each.finish_reason == "stop" and len(each.logprobs) == len(each.response_ids)
        assert SHORTEST <= len(each.response_ids) <= LONGEST and each.response_ids[-2:] == [8, 9]
        assert each.versions == (VersionSpan(3, 0, len(each.response_ids)),)
    assert len({len(each.response_ids) for each in parts.values()}) > 10


def test_answers_take_the_time_of_their_tokens_and_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    replica = TimedReplica(0, 0.5, [RESPONSE])

    async def ask() -> list[EngineReport]:
        first = await replica.generate([GenerateRequest(str(n), [1], SPEC) for n in range(9)], 10.0)
        known = {name: len(part.response_ids) for name, part in first.parts.items()}
        return [first, await replica.report(known, 1000.0)]

    first, second = asyncio.run(ask())
    assert {len(part.response_ids) for part in first.parts.values()} == {20} and slept[0] == 10.0
    assert all(part.finish_reason is None for part in first.parts.values())
    whole = [join_parts(part, second.parts[name]) for name, part in first.parts.items()]
    assert sum(slept) == pytest.approx(0.5 * max(len(each.response_ids) for each in whole))
    assert all(each.finish_reason == "stop" and each.response_ids[-2:] == [8, 9] for each in whole)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["ray::RolloutController"], "controller"), (["ray::ProfiledController.wait_batch"], "controller"),
        (["ray::TransferQueueController"], "queue"), (["ray::SimpleStorageUnit"], "queue"),
        (["ray::TimedReplica.generate"], "stand-ins"),
        ([sys.executable, "-m", "megarl.rewards.worker", "5"], "rewards"),
        (["/x/raylet/raylet", "--y"], "ray"), ([], "ray"),
    ],
)  # fmt: skip
def test_parts_by_command_line(command: list[str], part: str) -> None:
    assert part_of(command) == part


@pytest.mark.parametrize("in_flight", [1000, 10_000])
def test_admission_keeps_more_in_flight_than_asked_for(in_flight: int) -> None:
    """Even while one step is taken and two are ready."""
    config = Config.model_validate(config_of(argparse.Namespace(groups=25, reward_workers=1), Path("/x"), in_flight))
    assert list(pace_problems(config)) == []
    admission = Admission(config.batch.groups, pace_of(config))
    admission.set_version(0)
    started = len(admission.admit()) * SAMPLES_PER_GROUP
    step = config.batch.groups * SAMPLES_PER_GROUP
    assert in_flight <= started - 3 * step < in_flight + step


def test_the_meter_counts_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([{"controller": 1.0, "trainer": 9.0}, {"controller": 3.0, "trainer": 10.0}])
    monkeypatch.setattr(script, "processes", dict)
    monkeypatch.setattr(script, "cpu_seconds", lambda parts: next(used))
    monkeypatch.setattr(script, "private_mib", lambda parts: {"controller": 50.0})
    meter = Meter(warm_up=100, trajectories=1000)
    for number in range(12):
        meter.see(TakenBatch(finished=100 * number, in_flight=number, seconds=float(number)))
    result = meter.result(64)
    # The first step that counts is the one with 100 finished, at 1 s.
    assert (result.rate, result.in_flight) == (100.0, 6.5 * SAMPLES_PER_GROUP)
    assert result.cost_ms == {"controller": 2.0, "trainer": 1.0} and result.cost == 2.0
    assert result.memory_mib == [{"controller": 50.0}] * 10
    with pytest.raises(ValueError, match="no step after the first 5 trajectories"):
        Meter(5, 10).result(1)


MEASURED = Measured(1000, 1016.0, 1200.0, {"controller": 0.5, "queue": 0.2, "stand-ins": 7.0}, [{"queue": 100.0}] * 10)


def test_growth_compares_the_ends() -> None:
    sizes = [1.0, 1.0, 100.0, 100.0, 500.0, 500.0, 500.0, 500.0, 120.0, 120.0]
    assert replace(MEASURED, memory_mib=[{"queue": size} for size in sizes]).growth == 1.2
    assert MEASURED.cost == pytest.approx(0.7)


def test_each_bound_can_be_missed() -> None:
    def missed(**changed: object) -> list[str]:
        most = replace(MEASURED, **({"wanted": 10_000, "in_flight": 10_000.0} | changed))
        return [row.name.split(",")[0].split(" /")[0] for row in rows_of([MEASURED, most], "2 cores") if not row.ok]

    assert missed() == []
    assert missed(rate=999.0) == ["rate"]
    assert missed(in_flight=9999.0) == ["in flight"]
    assert missed(cost_ms={"controller": 0.95}) == ["cost"]
    assert missed(memory_mib=[{"queue": 100.0 + number} for number in range(10)]) == ["memory"]
