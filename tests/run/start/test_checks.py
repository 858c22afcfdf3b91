"""The checks before a start try all that the run will open and call, and tell all problems together."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import PromptEncoder, load_tokenizer
from megarl.cli import main
from megarl.config.checks.sections import detect_device
from megarl.config.loading.load import load_config
from megarl.config.schema.data import DataConfig
from megarl.data import check_tokenizer
from megarl.data.dataset import load_prompts
from megarl.models.hf.read_config import load_info
from megarl.run.start import checks
from megarl.run.start.checks import check_start, is_checked, mark_checked, start_findings
from tests.support.checkout import ROOT
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.check_start import problems_of
from tests.support.trainer.configs import config, tree

PLANNED_IN_CI = ("quickstart_cpu", "qwen2_5_7b_retool_4x4", "qwen3_30b_a3b_grpo_80x48")
SHARE = "tests.support.rewards.reward_functions:digit_share"
BROKEN = "tests.support.rewards.reward_functions:broken"


def with_header(path: Path, change: Any) -> None:
    """Change the header of a safetensors file, whose tensors stay where they are."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + whole[8 + length :])


def test_all_problems_are_reported_together(model: Path, data: Path) -> None:
    data.write_text(data.read_text() + "no\n")
    (model / "chat_template.jinja").unlink()
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 8)
    reported = problems_of(config(model, data, reward__function=BROKEN))
    assert [each.partition(":")[0] for each in reported] == ["data", "model.path", "model.path", "reward.function"]
    assert f"{data}:5:1: not JSON" in reported[0] and "has no chat template: put a chat_template.jinja" in reported[1]
    assert f"{model / 'model.safetensors'} is not a complete safetensors file" in reported[2]
    assert f"the first row of {data}" in reported[3] and "LookupError: the judge has no key" in reported[3]
    assert "reward.trial_call: false" in reported[3]


def test_a_function_may_fail_where_the_config_says_what_that_means(sound: Path, data: Path) -> None:
    expects = config(sound, data, reward__function=BROKEN, reward__on_error=0.0)
    [warning] = check_start(expects, load_info(sound)).warnings
    assert "LookupError: the judge has no key" in warning
    uncalled = config(sound, data, reward__function=BROKEN, reward__trial_call=False)
    assert check_start(uncalled, load_info(sound)).warnings == []


def test_a_missing_and_a_misshapen_tensor_are_named(model: Path, data: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["model.renamed.weight"] = header.pop("model.norm.weight")
        header["lm_head.weight"]["shape"].reverse()

    with_header(model / "model.safetensors", change)
    [problem] = problems_of(config(model, data, reward__function=SHARE, reward__trial_call=False))
    assert problem.startswith("model.path: ") and "1 missing tensors:\n    model.norm.weight" in problem
    assert "lm_head.weight in" in problem and "config.json implies" in problem
    unread = config(model, data, reward__function=SHARE, reward__trial_call=False, model__load_weights=False)
    assert check_start(unread, load_info(model)).warnings == []


@pytest.mark.parametrize(
    ("device", "precision", "installed", "warned"),
    [("cuda", "bf16", False, True), ("cuda", "bf16", True, False), ("cuda", "fp32", False, False),
     ("cpu", "bf16", False, False)],
)  # fmt: skip
def test_a_start_warns_where_delta_net_layers_would_run_without_their_kernels(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, device: str, precision: str, installed: bool,
    warned: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(checks, "detect_device", lambda: device)
    monkeypatch.setattr(checks, "find_spec", lambda name: object() if installed else None)
    for family in ("qwen3", "qwen3_5"):
        model = make_tiny_model(tmp_path / family, family)
        quiet = config(model, data, reward__trial_call=False, trainer__precision=precision)
        warnings = start_findings(quiet, load_info(model)).warnings
        assert ["fla-core is not installed" in each for each in warnings] == [True] * (warned and family == "qwen3_5")


def test_a_checkpoint_that_is_to_be_resumed_and_is_not_there_is_reported_too(
    sound: Path, data: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"data": {"path": str(data)}, "checkpoint": {"resume": str(tmp_path / "gone")}}
    (problem,) = problems_of(config(sound, **sections))
    assert str(tmp_path / "gone") in problem


def test_the_template_renders_each_set_with_its_own_variables(model: Path, data: Path) -> None:
    held = [{"name": "held", "path": str(data), "chat_template_kwargs": {"enable_thinking": False}}]
    chosen = config(model, data, reward__function=SHARE, reward__trial_call=False, evaluation__sets=held)
    [problem] = problems_of(chosen)
    assert problem.startswith("evaluation.sets.0: chat_template_kwargs: enable_thinking: no variable")
    template = model / "chat_template.jinja"
    template.write_text("{{ messages[0]['content'] + 1 }}")
    [problem] = problems_of(config(model, data, reward__function=SHARE, reward__trial_call=False))
    assert problem.startswith(f"data: {data}:1: the chat template refuses its messages: can only concatenate")


def test_a_dry_run_shows_what_the_model_and_the_reward_will_see_before_the_plan(
    sound: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": "x" * length, "answer": answer} for length, answer in ((9, "1"), (1, ""), (4, "7"))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.yaml"
    changes = {"data__suffix": " Think.", "admission__mode": "async", "run__steps": 3, "data__max_prompt_tokens": 64}
    path.write_text(json.dumps(tree(sound, data, reward__function=SHARE, **changes)))
    command = ["train", "--config", str(path), "--dry-run"]
    assert main.main(command) == 0
    shown = " ".join((whole := capsys.readouterr().out).split())
    lengths = [
        len(PromptEncoder(load_tokenizer(sound)).encode(each))
        for each in load_prompts(data, DataConfig(suffix=" Think."))
    ]
    expected = [
        f"# data and reward data 3 prompts of {data}; tokens: {lengths[1]} shortest, {lengths[2]} median, "
        f"{lengths[0]} longest",
        f"reward {SHARE}: 1 for the reference answer",
        "# first prompt, as the model sees it <|im_start|>user xxxxxxxxx Think.<|im_end|> <|im_start|>assistant",
        "# plan device path",
        "weights publishes every 4 updates, tokens at most 5 updates old",
        "# resolved config",
        "note: admission.sync_interval: 4 updates are more than the 3 of the whole run",
        "note: data: 1 of 3 rows have an empty answer",
    ]
    assert [shown.index(each) for each in expected] == sorted(shown.index(each) for each in expected)
    assert "default" not in whole.replace("--all adds the defaults", "")
    assert main.main([*command, "--all"]) == 0 and "# expert default: " in capsys.readouterr().out


def test_of_a_long_prompt_both_ends_are_shown(sound: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tokenizer, "SHOWN_CHARACTERS", 22)
    data.write_text(json.dumps({"problem": "abc" + "x" * 9, "answer": "1"}) + "\n")
    found = start_findings(config(sound, data, reward__function=SHARE), load_info(sound))
    [text] = [value for name, value in found.seen if name == "first prompt"]
    assert text == "<|im_start|>user\nabcxx\n[... 18 characters ...]\n<|im_start|>assistant\n"


def test_rows_that_a_shipped_reward_cannot_use_are_reported_together(model: Path, data: Path) -> None:
    rows = [{"problem": "p", "answer": "1"}, {"problem": "p", "answer": "two"}, {"problem": "p", "answer": "three"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [problem] = problems_of(config(model, data, reward__function="gsm8k"))
    assert problem.startswith("data: 2 rows: the reward cannot use it\n")
    assert f"{data}:2: the reference answer 'two' has no number" in problem
    expects = config(model, data, reward__function="gsm8k", reward__on_error=0.0)
    assert start_findings(expects, load_info(model)).problems == []
    rows = [{"problem": "p", "answer": "", "tests": tests} for tests in ("assert f(1) == 1", "print(f(1))")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [problem] = problems_of(config(model, data, reward__function="code", reward__trial_call=False))
    assert problem.startswith(f"data: {data}:2: the reward cannot use it: ")


def test_only_the_process_that_has_checked_speaks_for_its_ranks() -> None:
    environment = {"MEGARL_CHECKED_BY": str(os.getppid())}
    assert is_checked(environment)
    mark_checked(environment)
    assert not is_checked(environment) and environment["MEGARL_CHECKED_BY"] == str(os.getpid())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in PLANNED_IN_CI else pytest.mark.slow)
        for path in sorted((ROOT / "examples/rl/configs").iterdir())
    ],
)
def test_a_shipped_recipe_is_planned_without_its_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command of the documentation, in a new clone: neither models nor data are there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "--config", f"examples/rl/configs/{path.name}", "--dry-run"]) == 0
    chosen, text = load_config(path), " ".join(capsys.readouterr().out.split())
    device = "cuda" if chosen.trainer.device_memory_gib else detect_device()
    assert f"device path {device.upper()}" in text and f"name: {chosen.run.name}" in text
    assert f"model.path ({chosen.model.path})" in text and f"data.path ({chosen.data.path})" in text
    assert "not on this machine, so not checked" in text


def test_data_that_are_here_are_checked_although_the_model_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "x", \n')
    recipe = ROOT / "examples/rl/configs/qwen3_8b_gsm8k_8.yaml"
    command = ["train", "--config", str(recipe), "--dry-run", f"data.path={tmp_path / 'mine.jsonl'}"]
    with pytest.raises(SystemExit, match="2"):
        main.main(command)
    reported = capsys.readouterr()
    assert f"data: {tmp_path / 'mine.jsonl'}:2:" in reported.err and not reported.out
    with pytest.raises(SystemExit, match="2"):
        main.main(
            ["train", "--config", str(recipe), "--dry-run", "--all-mistakes", f"data.path={tmp_path / 'mine.jsonl'}"]
        )
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'mine.jsonl'}:2:")
