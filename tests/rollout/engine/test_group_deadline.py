"""The time by which a prompt group has to end: by the config, and in small runs with one straggler."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import BatchNotReady
from megarl.queue.trajectory import FinishReason, Trajectory, VersionSpan
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import EngineReport, ResponsePart
from tests.support.engines.fake_replicas import Method, SharesCalls, fleet_of
from tests.support.rollout.fake_rollout import local_controller
from tests.support.trainer.configs import config as config_of


@pytest.mark.parametrize(
    ("rollout", "deadline"),
    [
        ({}, None),
        ({"on_group_deadline": "fail"}, None),
        ({"group_deadline_s": 30, "on_group_deadline": "finish"}, None),
        ({"group_deadline_s": 30}, GroupDeadline(130.0, 30.0, "cut", 60.0)),
        ({"group_deadline_s": 30, "on_group_deadline": "fail"}, GroupDeadline(130.0, 30.0, "fail", 60.0)),
    ],
    ids=str,
)
def test_the_deadline_of_a_group_that_starts_now(rollout: dict[str, Any], deadline: GroupDeadline | None) -> None:
    assert GroupDeadline.of(config_of("model", rollout=rollout), now=100.0) == deadline


@pytest.mark.parametrize("mode", ["one_step_off", "stream", "async"])
def test_a_group_has_a_deadline_where_generation_runs_ahead(mode: str) -> None:
    """It leaves the trainer, which waits `timeouts.generate_s`, a tenth of that for all that follows."""
    ahead: dict[str, Any] = {"admission__mode": mode, "timeouts__generate_s": 1000.0}
    assert GroupDeadline.of(config_of("model", **ahead), now=100.0) == GroupDeadline(1000.0, 900.0, "cut", 50.0)
    given = GroupDeadline.of(config_of("model", rollout__group_deadline_s=30.0, **ahead), now=100.0)
    assert given == GroupDeadline(130.0, 30.0, "cut", 60.0)
    assert GroupDeadline.of(config_of("model", rollout__on_group_deadline="finish", **ahead), now=100.0) is None


GROUPS, SAMPLES, STEPS = 3, 2, 2
DEADLINE_S = 1.0  # on a busy machine too, the groups without a straggler end before it
HELD_S = 5.0  # a run that keeps the rules needs a fraction of it


class OneStraggles(SharesCalls):
    """Answers at once, except for the responses of group 0: these get a token at once and one per report."""

    def __init__(self) -> None:
        self.version = 0
        self.generate, self.report, self.end = Method(self._generate), Method(self._report), Method(self._end)

    def _part(self, end: FinishReason | None) -> ResponsePart:
        return ResponsePart([8], [-0.5], (VersionSpan(self.version, 0, 1),), end, 0.1)

    async def _generate(self, requests: list[GenerateRequest], wait_s: float) -> EngineReport:
        straggles = requests[0].request_id.split("-")[1] == "0"
        return {request.request_id: self._part(None if straggles else "stop") for request in requests}, EngineLoad()

    async def _report(self, reported: dict[str, int], wait_s: float) -> EngineReport:
        await asyncio.sleep(wait_s)
        return dict.fromkeys(reported, self._part(None)), EngineLoad()

    async def _end(self, reported: dict[str, int]) -> EngineReport:
        return dict.fromkeys(reported, self._part("abort")), EngineLoad()


def train_with_a_straggler(directory: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Two steps, one off: the second one is the last that may train the straggler, so it waits for it.

    Raises AssertionError unless the straggler ends within the bound as `policy` says, and its engine stays.
    """
    replica = OneStraggles()
    fleet = fleet_of({0: replica}, generate_s=60.0, interval_s=0.01)
    config = config_of(
        "model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, admission={"mode": "one_step_off"},
        rollout={"group_deadline_s": DEADLINE_S, "on_group_deadline": policy},
    )  # fmt: skip
    local = local_controller(config, directory, monkeypatch, fleet=fleet)

    async def run() -> None:
        found: list[Trajectory] = []
        metrics: list[Mapping[str, float]] = []
        for step in range(STEPS):
            replica.version = step
            await local.controller.set_version(step)
            try:
                batch = await local.controller.wait_batch(step, HELD_S)
            except BatchNotReady:
                raise AssertionError("the straggler holds the trainer") from None
            rows = [local.queue.rows[key] for key in batch.keys]
            found += [row for row in rows if row.group_id == 0]
            metrics.append(batch.timings)
            failed = len({row.group_id for row in rows if row.status == "failed"})
            ends = {"trained": GROUPS - failed, "filtered": 0, "dropped_stale": 0, "failed": failed}
            assert (await local.controller.commit(step, **ends)).balanced
        assert len(found) == SAMPLES, "the straggler is lost"
        assert fleet.serving == [0] and not fleet.lost, "the straggler costs its engine"
        if policy == "cut":
            cut = all(row.status == "ok" and row.finish_reason == "length" and row.response_ids for row in found)
            assert cut and sum(each["rollout/cut"] for each in metrics) == SAMPLES, "the straggler is not cut"
        else:
            counted = [each["rollout/failed_length_max"] for each in metrics if "rollout/failed_length_max" in each]
            assert all(row.status == "failed" for row in found), "the straggler does not fail"
            assert len(counted) == 1 and counted[0] > 1, "the straggler's lengths vanish"
        await local.controller.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["cut", "fail"])
def test_a_straggler_holds_the_trainer_to_its_deadline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    train_with_a_straggler(tmp_path, monkeypatch, policy)
