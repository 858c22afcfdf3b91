"""The evaluation harness: who is asked what, what is reported, and how a failure ends."""

import asyncio

import pytest

from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.evaluation.harness import evaluate_set
from megarl.evaluation.table import render_line
from megarl.telemetry.metrics.declarations import REGISTRY


async def respond(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
    await asyncio.sleep(0)
    if mode == "greedy":
        return ScoredResponse(
            1.0 if problem == "easy" else 0.0, "4" if problem == "easy" else None, 7, problem == "long"
        )
    return ScoredResponse(float(sample == index), str(sample), 3)


def test_every_problem_gets_one_greedy_and_k_samples():
    report = asyncio.run(evaluate_set("dev", ["easy", "long"], respond, samples=4, version=3))
    assert (report.n, report.version) == (2, 3)
    assert report.greedy.mean.value == 0.5 and report.greedy.samples_per_problem == 1
    assert report.greedy.truncated_share == 0.5 and report.greedy.parsed_share == 0.5
    assert report.sampled.mean.value == 0.25
    assert {k: each.value for k, each in report.sampled.pass_at.items()} == {1: 0.25, 2: 0.5, 4: 1.0}
    assert report.to_dict()["sampled"]["pass@4"]["value"] == 1.0


def test_metrics_are_the_declared_ones():
    metrics = asyncio.run(evaluate_set("dev", ["easy", "long"], respond, samples=2, version=0)).metrics()
    for name in metrics:
        REGISTRY.lookup(name)
    assert metrics["eval/dev/greedy"] == 0.5 and metrics["eval/dev/n"] == 2
    assert metrics["eval/dev/greedy_low"] < 0.5 < metrics["eval/dev/greedy_high"]
    assert {"eval/dev/pass@2", "eval/dev/maj@2", "eval/dev/length_mean", "eval/dev/parsed"} <= set(metrics)


def test_the_line_a_run_prints():
    report = asyncio.run(evaluate_set("dev", ["easy", "long"], respond, samples=4, version=3))
    line = render_line("after", report)
    assert line.startswith("eval dev (after): greedy 50.0% [") and "sampled mean@4 25.0% [" in line
    assert line.endswith("2 problems, 50.0% parsed, 50.0% truncated")


def judged_by(broken: str):
    """Responses whose judge fails: none, those of the problem `long`, or all."""

    async def respond_or_fail(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
        fails = broken == "all" or problem == broken
        return ScoredResponse(0.0, failure=SampleFailure("reward", "exception: no key 'x'") if fails else None)

    return respond_or_fail


@pytest.mark.parametrize(("broken", "errors"), [("none", 0), ("long", 3), ("all", 6)])
def test_failures_reach_metrics_line_and_message(broken: str, errors: int):
    report = asyncio.run(evaluate_set("dev", ["easy", "long"], judged_by(broken), samples=2, version=0))
    metrics = report.metrics()
    assert (metrics["eval/dev/reward_errors"], metrics["eval/dev/failed_generations"]) == (errors, 0)
    first = f", {errors} of 6 rewards failed; the first: exception: no key 'x'" if errors else ""
    line = render_line("after", report)
    message = "all 6 responses of set 'dev' failed (0 generations, 6 rewards), so its figures mean nothing; "
    assert report.nothing_judged == (f"{message}the first: exception: no key 'x'" if broken == "all" else None)
    # An accuracy of 0.0% would look like a judgement.
    if broken == "all":
        assert line == f"eval dev (after): {report.nothing_judged}"
    else:
        assert line.endswith(f"truncated{first}")


def test_a_failure_is_raised_as_itself_and_stops_the_rest():
    ended = []

    async def fails(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
        if problem == "broken":
            raise RuntimeError("engine 1 died")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(problem)
            raise
        return ScoredResponse(0.0)

    with pytest.raises(RuntimeError, match="engine 1 died"):
        asyncio.run(evaluate_set("dev", ["fine", "broken"], fails, samples=1, version=0))
    assert ended == ["fine", "fine"]


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match="'dev' is empty"):
        asyncio.run(evaluate_set("dev", [], respond, samples=1, version=0))
