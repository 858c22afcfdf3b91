"""The checks of a run that starts elsewhere: what is here of it is tried, and what is left out is named."""

from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.run.start import dry_run
from megarl.run.start.dry_run import elsewhere_findings
from tests.support.checkout import ROOT
from tests.support.trainer.configs import config

RECIPE = str(ROOT / "examples/rl/configs/qwen3_8b_gsm8k_8.yaml")
FUNCTIONS = "tests.support.rewards.reward_functions"
LEFT = "not checked here, only where the run starts: tokenizer and chat template, lengths of the prompts, weights, "


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", f"reward.function '{FUNCTIONS}:absent' cannot be imported: AttributeError"),
        ("by_response", "a reward must be a number or a RewardResult, not None"),
    ],
)
def test_a_recipe_without_its_model_is_refused_for_a_reward_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, message: str
) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### none"}\n')
    own = [f"data.path={data}", f"reward.function={FUNCTIONS}:{function}"]
    with pytest.raises(SystemExit, match="2"):
        main.main(["train", "--config", RECIPE, "--dry-run", *own])
    refused = capsys.readouterr()
    assert message in refused.err and "--no-files of `megarl plan`" in refused.err and not refused.out
    assert main.main(["plan", "--config", RECIPE, "--no-files", *own]) == 0


def test_a_recipe_without_its_model_and_data_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "--config", RECIPE, "--dry-run"]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "note: reward.function: imported but not called, because data.path is not here" in message
    assert f"note: {LEFT}the checkpoint to resume from" in message


def test_a_reward_is_called_where_the_file_of_one_of_its_sets_is_here(data: Path, tmp_path: Path) -> None:
    held: list[dict[str, Any]] = [
        {"name": "here", "path": str(data), "reward": {"function": f"{FUNCTIONS}:broken"}},
        {"name": "gone", "path": str(tmp_path / "no"), "reward": {"function": f"{FUNCTIONS}:plain"}},
    ]
    fields = {"reward__function": f"{FUNCTIONS}:digit_share", "checkpoint__resume": "never", "evaluation__sets": held}
    found = elsewhere_findings(config("gone", data, agent__loop="tool_agent", **fields))
    [problem] = found.problems
    assert problem.startswith("evaluation.sets.0.reward.function: a trial call of ") and "no key" in problem
    assert found.notes == [
        "evaluation.sets.1.reward.function: imported but not called, because evaluation.sets.1.path is not here",
        LEFT.replace("weights, ", "loop and tools of the agent, weights"),
    ]
    unasked = elsewhere_findings(config("gone", data, reward__trial_call=False, **fields))
    assert unasked.problems == [] and unasked.notes == [LEFT.removesuffix(", ")]


def test_a_reward_that_needs_what_only_the_other_machines_have_is_not_tried(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE", raising=False)
    judge = {"function": f"{FUNCTIONS}:scaled_digit_share", "kwargs": {"scale": {"env": "JUDGE"}}}
    found = elsewhere_findings(config("gone", data, reward=judge))
    assert found.problems == []
    unset = "the environment variable JUDGE of reward.kwargs.scale is not set"
    assert found.notes[0] == f"reward.function: not tried here, because {unset}"
    monkeypatch.setattr(dry_run, "sandbox_problem", lambda: "bubblewrap is missing")
    data.write_text('{"problem": "p", "answer": "", "tests": "assert f(1) == 1"}\n')
    found = elsewhere_findings(config("gone", data, reward__function="code"))
    assert found.problems == []
    lack = "there is no sandbox: bubblewrap is missing"
    assert found.notes[0] == f"reward.function: not tried here, because {lack}"
