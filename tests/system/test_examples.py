"""The tutorials of examples/tutorials, by the commands of their README."""

import asyncio
import json
import shlex
from typing import Any

import pytest

from megarl import RewardInput
from megarl.cli.main import main
from megarl.config.loading.load import load_config
from megarl.rewards.registry import resolve
from megarl.tools.process_tool import function_tool
from tests.support.models.tensors import differing
from tests.support.runs.run import Run
from tests.support.runs.tutorials import (
    COMMANDS,
    PREPARATION,
    TUTORIALS,
    Checkout,
    with_random_models,
)

TRAINS = {
    f"{name}-{number}": command
    for name, commands in COMMANDS.items()
    for number, command in enumerate(commands)
    if command.startswith("megarl train ")
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return with_random_models(Checkout(tmp_path_factory.mktemp("small") / "checkout"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """With the models and data that the README's first commands make."""
    checkout = Checkout(tmp_path_factory.mktemp("complete") / "checkout")
    for command in COMMANDS[PREPARATION]:
        if command.startswith("python "):
            checkout.call(command)
    return checkout


@pytest.mark.parametrize("name", TRAINS)
def test_each_config_can_be_planned(
    small: Checkout, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run imports and tries each function that a config names, and reads data and model."""
    monkeypatch.chdir(small.directory)
    if name.startswith("two_data_sets"):
        small.call(COMMANDS["two_data_sets"][0])
    assert main([*shlex.split(TRAINS[name])[1:], "--dry-run"]) == 0, capsys.readouterr().err
    assert "32 groups, 256 samples" in capsys.readouterr().out


def section(name: str, key: str) -> Any:
    """A section of a tutorial's config."""
    return getattr(load_config(TUTORIALS / name / "config.yaml"), key)


@pytest.mark.parametrize(
    ("response", "score"),
    [(r"ones 9+8=17, \boxed{57}", 0.98), (r"\boxed{47}", 0.18), ("57", -0.02), (r"\boxed{57}, \boxed{47}", 0.18)],
)
def test_the_reward_of_own_reward(response: str, score: float) -> None:
    reward = section("own_reward", "reward")
    result = resolve(reward.function, reward.kwargs)(RewardInput("", response, [0] * 4, answer="57"))
    assert result.score == pytest.approx(score)
    assert result.components == {"right": float(score > 0.5), "boxed": float("boxed" in response)}


@pytest.mark.parametrize(("response", "score"), [(r"\boxed{57}", 1), (r"\boxed{47}", 0.5), (r"\boxed{48}", 0), ("", 0)])
def test_the_reward_of_the_second_data_set(response: str, score: float) -> None:
    (_, carries) = section("two_data_sets", "data").sets
    row = {"question": "What is 19 + 38?", "solution": {"value": 57, "ones": 7}}
    assert resolve(carries.reward.function)(RewardInput("", response, answer="57", row=row)).score == score


def test_the_tool_of_agent_with_a_tool() -> None:
    (tool,) = section("agent_with_a_tool", "tools")
    made = function_tool(tool.kind)
    try:
        assert made.name == "calculator" and made.parameters["required"] == ["expression"]
        assert "Multiply whole numbers" in made.description
        right, wrong = (asyncio.run(made.call({"expression": text}, timeout_s=30)) for text in ("12*34", "12*x"))
        assert (right.text, right.error) == (
            "408",
            False,
        ) and wrong.text == "error: '12*x' is no product of whole numbers"
    finally:
        asyncio.run(made.close())


def check_own_loss(run: Run, steps: int) -> None:
    """Two updates per step, so that the second one's ratios differ from 1 and its weights are bounded."""
    assert run.summary["exit"] == "finished" and len(run.metrics) == steps
    for record in run.metrics:
        assert record["policy/updates"] == 2 and record["policy/clip_high"] > 0


def check_other_layout(run: Run, before: int, steps: int, convert: str, checkout: Checkout) -> None:
    """It has gone on after the first run's steps, and its last checkpoint converts to the policy that it exported."""
    assert f"{before} steps done" in run.output and "parallel.pipeline" in run.output
    assert [record["step"] for record in run.metrics] == list(range(1, steps + 1))
    assert run.summary["exit"] == "finished" and run.summary["steps"] == steps
    difference = run.summary["logprob_abs_diff"]["last"]
    assert difference["mean"] <= 1e-5 and difference["max"] <= 1e-4, difference
    checkout.call(convert)
    assert differing(run.directory / "hf", checkout.directory / "runs/tutorials/converted") == []


# --- each command as the README has it, and what the README says that one sees


@pytest.mark.slow
@pytest.mark.engine
def test_own_reward(made: Checkout) -> None:
    (train,) = COMMANDS["own_reward"]
    run = made.train(train, run_dir="runs/tutorials/own_reward")
    for record in run.metrics:
        assert record["reward/component/boxed"] > 0.9 and 0 < record["reward/component/right"] < 1
    for sample in samples_of(run):
        right = sample["response"].rpartition("\\boxed{")[2].partition("}")[0] == sample["reference"]
        assert sample["reward_components"]["right"] == right
        assert sample["reward"] == pytest.approx(max(right, 0.2 * sample["reward_components"]["boxed"])
                                                 - 0.005 * sample["response_tokens"])  # fmt: skip


def samples_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.engine
def test_own_loss(made: Checkout) -> None:
    try_functions, train = COMMANDS["own_loss"]
    made.call(try_functions)
    check_own_loss(made.train(train, run_dir="runs/tutorials/own_loss"), steps=8)


@pytest.mark.slow
@pytest.mark.engine
def test_two_data_sets(made: Checkout) -> None:
    make_data, train = COMMANDS["two_data_sets"]
    made.call(make_data)
    run = made.train(train, run_dir="runs/tutorials/two_data_sets/run")
    for record in run.metrics:
        assert (record["data/plain/groups"], record["data/carries/groups"]) == (8, 24)
        assert 0 < record["data/carries/reward_mean"] < 1 > record["data/plain/reward_mean"] > 0
    assert 0.5 in {sample["reward"] for sample in samples_of(run)} <= {0, 0.5, 1}


@pytest.mark.slow
@pytest.mark.engine
def test_agent_with_a_tool(made: Checkout) -> None:
    (train,) = COMMANDS["agent_with_a_tool"]
    run = made.train(train, run_dir="runs/tutorials/agent_with_a_tool")
    assert len(run.metrics) == 8 and all(0 < record["agent/tool_calls_mean"] <= 2 for record in run.metrics)
    by = [[part["by"] for part in sample.get("parts", [])] for sample in samples_of(run)]
    assert ["model", "environment", "model"] in by  # it has called, was answered, and has answered


@pytest.mark.slow
@pytest.mark.engine
def test_other_layout_and_convert_and_serve(made: Checkout) -> None:
    """The second of these tutorials begins with the checkpoint of the first one."""
    begin, resume = COMMANDS["other_layout"]
    made.train(begin, run_dir="runs/tutorials/other_layout")
    run = made.train(resume, run_dir="runs/tutorials/other_layout")
    convert, serve, ask = COMMANDS["convert_and_serve"]
    check_other_layout(run, before=4, steps=8, convert=convert, checkout=made)
    with made.serving(serve) as said:
        answer = made.call(ask)
    assert "/v1/chat/completions" in said
    assert "converted: " in answer and "\\boxed{" in answer
