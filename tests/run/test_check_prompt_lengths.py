"""The checks before a start measure the prompts, and refuse a set where and as the run would."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import Config
from megarl.data import check_files, check_tokenizer
from megarl.models.hf.read_config import load_info
from megarl.rollout.tasks.prompts import PromptSource
from megarl.run.start.checks import check_start, start_findings
from tests.support.trainer.check_start import problems_of
from tests.support.trainer.configs import config

REWARD: dict[str, Any] = {"function": "tests.support.rewards.reward_functions:digit_share", "trial_call": False}
SKIP = {"data__overlong_prompts": "skip"}
SHORT, LONG = "1+1=?", "1+1=" * 40


def written(path: Path, *problems: str) -> Path:
    rows = [{"problem": text, "answer": "2", "reply": text} for text in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chosen(model: Path, data: Path, **changes: Any) -> Config:
    return config(model, data, reward=REWARD, **{"data__max_prompt_tokens": 64, **changes})


def refusal(planned: Config) -> str:
    """The message of the rollout controller, after the start."""
    with pytest.raises(ValueError) as raised:
        PromptSource(planned)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([SHORT, LONG], {}),
        ([LONG, LONG], SKIP),
        ([SHORT, LONG], {"data__max_prompt_tokens": None, "trainer__micro_batch_tokens": 96}),
        ([SHORT, SHORT], {"data__demonstration_field": "reply", "sampling__max_tokens": 4}),
        ([SHORT, SHORT], {"data__demonstration_field": "reply", "sampling__max_tokens": 4, **SKIP}),
    ],
)
def test_a_training_set_is_refused_as_the_run_refuses_it(
    sound: Path, tmp_path: Path, rows: list[str], changes: dict[str, Any]
) -> None:
    planned = chosen(sound, written(tmp_path / "rows.jsonl", *rows), **changes)
    assert problems_of(planned) == [f"data: {refusal(planned)}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling__max_tokens": 480, "trainer__micro_batch_tokens": "auto"},
            "the model's positions - the longest response = 32; lower sampling.max_tokens",
        ),
        ({"rollout__max_model_len": 96}, "- the longest response = 64; raise the first, lower sampling.max_tokens"),
        ({"trainer__micro_batch_tokens": 96}, " - sampling.max_tokens = 64; raise trainer.micro_batch_tokens"),
    ],
)
def test_the_fix_for_a_prompt_that_is_too_long_is_possible(
    sound: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    planned = chosen(
        sound, written(tmp_path / "rows.jsonl", SHORT, LONG), **{"data__max_prompt_tokens": None, **changes}
    )
    [problem] = problems_of(planned)
    assert problem.startswith(f"data: {tmp_path / 'rows.jsonl'}:2 has ")
    assert problem.endswith(f"{message}, or set data.overlong_prompts: skip")


def test_an_evaluation_set_has_a_limit_of_its_own_and_skips_nothing(sound: Path, data: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "held.jsonl", SHORT, LONG)
    planned = chosen(sound, data, evaluation__sets=[{"name": "held", "path": str(path)}], **SKIP)
    message = refusal(planned)
    assert message.startswith(f"evaluation.sets.0 (held): {path}:2 has ")
    assert problems_of(planned) == [message.replace(" (held)", "")]
    fewer = chosen(sound, data, evaluation__sets=[{"name": "held", "path": str(path), "limit": 1}])
    PromptSource(fewer)
    assert check_start(fewer, load_info(sound)).warnings == []


def test_prompts_that_are_left_out_are_a_note_and_no_line_of_a_log(
    sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned = chosen(sound, written(tmp_path / "rows.jsonl", SHORT, LONG, SHORT, LONG, LONG), **SKIP)
    found = start_findings(planned, load_info(sound))
    assert found.problems == [] and caplog.text == ""
    assert found.notes == ["data: 3 of 5 prompts are too long, and left out (data.overlong_prompts: skip)"]
    assert PromptSource(planned).skipped == 3 and "3 of 5 prompts skipped as too long" in caplog.text


def test_of_a_large_file_the_first_prompts_are_measured_and_a_note_says_so(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "rows.jsonl", SHORT, SHORT, LONG)
    monkeypatch.setattr(check_tokenizer, "MOST_CHARACTERS", 2 * len(SHORT))
    planned = chosen(sound, path)
    found = start_findings(planned, load_info(sound))
    note = "data: the lengths of the first 2 prompts were checked; megarl plan --all-mistakes measures all"
    assert found.problems == [] and found.notes == [note]
    whole = start_findings(planned, load_info(sound), lambda _: None)
    assert whole.problems == [f"data: {refusal(planned)}"] and whole.notes == []


@pytest.mark.parametrize("bound", ["MOST_CHARACTERS", "MOST_ROWS"])
def test_if_the_first_prompts_are_all_left_out_others_may_not_be(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    path = written(tmp_path / "rows.jsonl", LONG, LONG, SHORT)
    monkeypatch.setattr(*((check_files, bound, 2) if bound == "MOST_ROWS" else (check_tokenizer, bound, 2 * len(LONG))))
    found = start_findings(chosen(sound, path, **SKIP), load_info(sound))
    assert found.problems == []
    assert "2 of the first 2 prompts are too long, and left out" in found.notes[-1]


def test_a_template_that_fails_with_a_later_prompt_is_reported(model: Path, tmp_path: Path) -> None:
    failing = "{% if messages[0]['content'] | length > 99 %}{{ messages[0]['content'] + 1 }}{% endif %}x"
    (model / "chat_template.jinja").write_text(failing)
    [problem] = problems_of(chosen(model, written(tmp_path / "rows.jsonl", SHORT, LONG)))
    assert problem.startswith(f"data: {tmp_path / 'rows.jsonl'}:2: the chat template refuses its messages: ")
