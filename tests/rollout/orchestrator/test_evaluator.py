"""Evaluations alongside training: what the engines are asked, when the reports come, and what stops them."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.formats import Prompt
from megarl.common.errors import RolloutError
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec
from megarl.rollout.orchestrator.controller import RolloutController
from megarl.rollout.orchestrator.step_batches import PublicationNeeded
from megarl.rollout.tasks.prompts import EvalSet, PromptTask
from tests.support.rollout.fake_rollout import LocalController, local_controller, response
from tests.support.trainer.configs import config as config_of

PROBLEMS, SAMPLES = 20, 2
SPEC = SamplingSpec.greedy(8, (2,))
WAIT_S = 5.0


class Engines:
    """Keeps every request of the evaluation until `open` is set; the version rises by one with each call."""

    def __init__(self, local: LocalController) -> None:
        self.open = asyncio.Event()
        self.asked: list[GenerateRequest] = []
        self.options: list[dict[str, Any]] = []
        self.most = self.now = 0
        self.failure: Exception | None = None
        local.fleet.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, context: Any, requests: list[GenerateRequest], **options: Any) -> list[GenerateResult]:
        version = 4 + len(self.options)
        self.asked += requests
        self.options.append(options)
        self.now += len(requests)
        self.most = max(self.most, self.now)
        await self.open.wait()
        self.now -= len(requests)
        if self.failure is not None:
            raise self.failure
        return [response(request, version) for request in requests]


def eval_sets() -> list[EvalSet]:
    problem = PromptTask(Prompt(0, [{"role": "user", "content": "3 + 4?"}], "7", {}), [1, 2], SPEC, "dev")
    return [EvalSet("dev", [problem] * PROBLEMS, SPEC, samples=SAMPLES)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RolloutController, Engines, Any]]:
    def build(**changes: Any) -> tuple[RolloutController, Engines, Any]:
        config = config_of("model", rollout__max_num_seqs=20, **changes)
        local = local_controller(config, tmp_path, monkeypatch)
        local.controller._source.eval_sets = eval_sets  # type: ignore[method-assign]
        return local.controller, Engines(local), local.fleet

    return build


async def test_its_requests_give_way_and_its_report_has_the_versions_it_saw(make: Any, tmp_path: Path) -> None:
    controller, engines, _ = make()
    await controller.start_evaluation(4, "step_2")
    assert await controller.take_evaluations() == []
    engines.open.set()
    [finished] = await controller.take_evaluations(WAIT_S)
    assert await controller.take_evaluations(WAIT_S) == []
    [report] = finished.reports
    assert (finished.label, report.version, report.n) == ("step_2", 4, PROBLEMS)
    assert (report.oldest, report.newest) == (4, 3 + len(engines.options)) and len(engines.options) > 1
    assert {request.priority for request in engines.asked} == {1}
    assert {options["background"] for options in engines.options} == {True}
    assert engines.most <= 5  # a quarter of the engine's 20 places
    records = [json.loads(line) for line in (tmp_path / "eval_step_2.jsonl").read_text().splitlines()]
    assert len(records) == PROBLEMS * (1 + SAMPLES)
    assert {record["versions"][0][0] for record in records} == set(range(4, report.newest + 1))


async def test_every_set_is_evaluated_and_recorded(make: Any, tmp_path: Path) -> None:
    controller, engines, _ = make()
    [dev] = eval_sets()
    controller._source.eval_sets = lambda: [dev, replace(dev, name="math", problems=dev.problems[:3], records=[])]
    engines.open.set()
    found = await controller.evaluate(4, "after")
    assert [(report.name, report.n) for report in found] == [("dev", PROBLEMS), ("math", 3)]
    records = [json.loads(line) for line in (tmp_path / "eval_after.jsonl").read_text().splitlines()]
    sizes = Counter(record["set"] for record in records)
    assert sizes == {"dev": PROBLEMS * (1 + SAMPLES), "math": 3 * (1 + SAMPLES)}


async def test_the_trainer_can_still_wait_for_an_evaluation_of_one_version(make: Any) -> None:
    controller, engines, _ = make()
    engines.open.set()
    [report] = await controller.evaluate(4, "after")
    assert {request.priority for request in engines.asked} == {0} and engines.most > 5
    assert {options["background"] for options in engines.options} == {False} and report.n == PROBLEMS


async def test_one_at_a_time(make: Any) -> None:
    controller, engines, _ = make()
    await controller.start_evaluation(4, "step_2")
    with pytest.raises(ValueError, match="'step_4' cannot start while 'step_2' is running"):
        await controller.start_evaluation(6, "step_4")
    engines.open.set()
    await controller.take_evaluations(WAIT_S)
    await controller.start_evaluation(6, "step_4")
    [finished] = await controller.take_evaluations(WAIT_S)
    assert finished.label == "step_4"


async def test_one_that_does_not_end_is_named(make: Any) -> None:
    controller, _, _ = make()
    await controller.start_evaluation(4, "step_2")
    with pytest.raises(RolloutError, match=r"waited 0 s .*evaluation 'step_2' alongside training"):
        await controller.take_evaluations(0.05)


async def test_a_trainer_that_waits_for_it_learns_soon_that_no_replica_is_left(make: Any) -> None:
    """It publishes to new ones, with which the evaluation goes on."""
    controller, engines, fleet = make()
    await controller.begin(None)
    await controller.start_evaluation(4, "step_2")
    waiting = asyncio.ensure_future(controller.take_evaluations(WAIT_S))
    await asyncio.sleep(0)
    fleet.needs_publication = "replica 0 has died"
    assert await waiting == PublicationNeeded("replica 0 has died")
    assert await controller.take_evaluations() == [], "who does not wait hears nothing"
    fleet.needs_publication = ""
    engines.open.set()
    assert len(await controller.take_evaluations(WAIT_S)) == 1
    fleet.needs_publication = "replica 0 has died"
    assert await controller.take_evaluations(WAIT_S) == [], "nothing is waited for"


async def test_its_failure_ends_the_run(make: Any) -> None:
    controller, engines, _ = make()
    await controller.start_evaluation(4, "step_2")
    engines.failure = RolloutError("no replica is left")
    engines.open.set()
    with pytest.raises(RolloutError, match="no replica is left"):
        await controller.take_evaluations(WAIT_S)
    with pytest.raises(RolloutError, match="no replica is left"):
        await controller.admit()


@pytest.mark.parametrize("begun", [True, False], ids=["while it runs", "before it has begun"])
async def test_a_trainer_that_restarts_finds_no_evaluation(make: Any, begun: bool) -> None:
    controller, engines, _ = make()
    await controller.start_evaluation(4, "step_2")
    while begun and not engines.asked:
        await asyncio.sleep(0.01)
    await controller.begin(None)
    assert await controller.take_evaluations(0.05) == []
    engines.open.set()
    await controller.start_evaluation(4, "step_2")
    assert len(await controller.take_evaluations(WAIT_S)) == 1
