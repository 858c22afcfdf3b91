"""`megarl eval`: from options to a config, messages for mistakes, and one real engine end to end."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl.cli import evaluate as standalone
from megarl.cli.evaluate import eval_config, report_content
from megarl.cli.main import build_parser, main
from megarl.common.errors import ConfigError, RolloutError
from megarl.common.rundir.notices import write_notice
from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.evaluation.harness import evaluate_set


@pytest.fixture(scope="module")
def heldout(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "heldout.jsonl"
    rows = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(*arguments: str):
    return eval_config(build_parser().parse_args(["eval", *arguments]))


def test_options_become_a_config(model, heldout, tmp_path):
    config = config_of(
        "--model", str(model), "--data", str(heldout), "--data", "other/heldout.jsonl", "--samples", "8",
        "--temperature", "0.7", "--top-k", "20", "--limit", "5", "--max-tokens", "64", "--run-dir", str(tmp_path),
        "--reward", "gsm8k", "reward.timeout_s=3",
    )  # fmt: skip
    assert [(each.name, each.limit) for each in config.evaluation.sets] == [("heldout", 5), ("other-heldout", 5)]
    assert config.rollout.load_weights, "no sync brings the weights"
    sampling = config.evaluation.sampling
    assert (sampling.samples, sampling.temperature, sampling.top_k) == (8, 0.7, 20)
    assert config.sampling.max_tokens == 64 and config.run_dir == tmp_path
    assert config.reward.function == "gsm8k" and config.reward.timeout_s == 3
    assert config_of("--model", str(model), "--data", str(heldout)).sampling.max_tokens == 256  # of 512 positions
    assert config_of("--model", "nowhere", "--data", str(heldout)).sampling.max_tokens == 1024
    # A float32 checkpoint is evaluated in float32, not in what a training run would default to.
    assert config.trainer.precision == "fp32"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--model", "nowhere", "--data", "{data}"], ["--model: no such directory: nowhere"]),
        (["--model", "{model}", "--data", "nowhere.jsonl"], ["--data: no such file: nowhere.jsonl"]),
        (["--model", "{model}", "--data", "{data}", "--samples", "0"], ["--samples: must be at least 1"]),
        (["--model", "{model}", "--data", "{data}", "--temperature", "0"], ["--temperature: must be greater than 0"]),
        (["--model", "{model}", "--data", "{data}", "--limit", "0"], ["--limit: must be at least 1"]),
        (["--model", "{model}", "--data", "{data}", "--max-tokens", "9999"], ["--max-tokens: responses of 9999"]),
        (["--model", "{model}", "--data", "{data}", "--reward", "nonsense"], ["--reward: 'nonsense' is neither"]),
        (["--model", "{model}", "--data", "{data}", "reward.nonsense=1"], ["reward.nonsense: no such key"]),
    ],
)
def test_mistakes_end_with_one_message_naming_the_option(model, heldout, arguments, messages, capsys):
    filled = [argument.format(model=model, data=heldout) for argument in arguments]
    assert main(["eval", *filled]) == 2
    error = capsys.readouterr().err
    for message in messages:
        assert error.count(message) == 1
    assert error.startswith("megarl: ") and "Traceback" not in error


def test_one_problem_is_reported_once(model):
    # data.path and evaluation.sets.0.path are both the same option.
    with pytest.raises(ConfigError) as caught:
        config = config_of("--model", str(model), "--data", "nowhere.jsonl")
        from megarl.cli.evaluate import _check

        _check(config)
    assert len(caught.value.problems) == 1


def test_bad_data_and_tokenizer_are_reported_before_anything_starts(model, heldout, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(heldout.read_text() + "{not json\n")
    run_dir = tmp_path / "run"
    assert main(["eval", "--model", str(model), "--data", str(broken), "--run-dir", str(run_dir)]) == 2
    assert f"{broken}:7:2: not JSON" in capsys.readouterr().err
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"problem": "x" * 600, "answer": "1"}) + "\n" + heldout.read_text())
    assert main(["eval", "--model", str(model), "--data", str(long), "--run-dir", str(run_dir)]) == 2
    assert ":1 has 6" in capsys.readouterr().err
    assert not run_dir.exists()


@pytest.mark.parametrize(("failing", "code"), [("none", 0), ("all", 1)])
def test_a_set_of_which_nothing_could_be_judged_ends_with_one_message(
    model, heldout, tmp_path, capsys, monkeypatch, failing, code
):
    failure = SampleFailure("reward", "exception: no key 'x'") if failing == "all" else None

    async def respond(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
        return ScoredResponse(0.0, failure=failure)

    def evaluate(config):
        return [asyncio.run(evaluate_set("heldout", ["a", "b"], respond, samples=2, version=0))]

    monkeypatch.setattr(standalone, "_evaluate", evaluate)
    path = tmp_path / "report.json"
    arguments = ["eval", "--model", str(model), "--data", str(heldout), "--run-dir", str(tmp_path), "--json", str(path)]
    assert main(arguments) == code
    said = "megarl: all 6 responses of set 'heldout' failed (0 generations, 6 rewards), so its figures mean nothing"
    assert capsys.readouterr().err.count(said) == code
    (written,) = json.loads(path.read_text())["sets"]
    assert (written["greedy"]["reward_errors"], written["sampled"]["reward_errors"]) == (2 * code, 4 * code)


def test_the_last_notices_of_a_start_that_fails_are_shown(model, heldout, tmp_path, capsys, monkeypatch):
    config = config_of("--model", str(model), "--data", str(heldout), "--run-dir", str(tmp_path))
    (tmp_path / "logs").mkdir()

    def fail(*arguments, **options):
        write_notice(tmp_path, "the pool hears why")
        raise RolloutError("the pool does not start")

    monkeypatch.setattr("megarl.cluster.pool.pool_process.launch_supervisor", fail)
    with pytest.raises(RolloutError):
        standalone._evaluate(config)
    assert "megarl: the pool hears why\n" in capsys.readouterr().err
    assert not [each for each in threading.enumerate() if each.name == "watch-notices"]


@pytest.mark.slow
@pytest.mark.engine
def test_a_real_engine_end_to_end(model, heldout, tmp_path):
    command = [
        sys.executable, "-m", "megarl", "eval", "--model", str(model), "--data", str(heldout), "--max-tokens", "16",
        "--samples", "2", "--limit", "4", "--run-dir", str(tmp_path / "run"), "--json", str(tmp_path / "report.json"),
        "timeouts.engine_start_s=1200",
    ]  # fmt: skip
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=550, env=dict(os.environ, OMP_NUM_THREADS="1")
    )
    assert ended.returncode == 0, ended.stderr
    assert "heldout greedy" in ended.stdout and re.search(r"pass@k.* heldout sampled +2 +\d", ended.stdout, re.DOTALL)
    report = json.loads((tmp_path / "report.json").read_text())
    (only,) = report["sets"]
    assert only["name"] == "heldout" and only["greedy"]["problems"] == 4 and "maj@2" in only["sampled"]
    assert 0 < only["greedy"]["mean_tokens"] <= 16
    lines = [json.loads(line) for line in Path(report["responses"]).read_text().splitlines()]
    assert len(lines) == 4 * (1 + 2)
    assert {line["reference"] for line in lines} == {"0", "2", "4", "6"}
    for mode in ("greedy", "sampled"):
        scores = [line["score"] for line in lines if line["mode"] == mode]
        assert sum(scores) / len(scores) == pytest.approx(
            next(v for k, v in only[mode].items() if "mean@" in k)["value"]
        )
    greedy = {line["index"]: line["response"] for line in lines if line["mode"] == "greedy"}
    assert greedy == transformers_greedy(model, [f"What is {i} + {i}?" for i in range(4)], 16)
    state = json.loads((tmp_path / "run" / "supervisor.json").read_text())
    assert not Path(f"/proc/{state['process']['pid']}").exists()


def transformers_greedy(model: Path, problems: list[str], max_tokens: int) -> dict[int, str]:
    """The answers of the checkpoint itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = {}
    for index, problem in enumerate(problems):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        output = plain.generate(ids, do_sample=False, max_new_tokens=max_tokens)
        answers[index] = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answers


def test_report_content_says_how_it_was_sampled(model, heldout):
    """Each set by what is its own, whichever option or override gave it."""

    async def respond(problem: str, index: int, mode: str, sample: int) -> ScoredResponse:
        return ScoredResponse(1.0)

    report = asyncio.run(evaluate_set("heldout", ["a", "b"], respond, samples=2, version=0))
    config = config_of("--model", str(model), "--data", str(heldout))
    (plain,) = json.loads(json.dumps(report_content([report], config)))["sets"]
    assert (plain["sampling"]["samples"], plain["max_tokens"], plain["reward"]) == (4, 256, config.reward.function)
    own = {"name": "heldout", "path": str(heldout), "max_tokens": 9, "sampling": {"temperature": 0.5},
           "reward": {"function": "gsm8k"}}  # fmt: skip
    overridden = config_of("--model", str(model), "--data", str(heldout), f"evaluation.sets={json.dumps([own])}")
    (chosen,) = report_content([report], overridden)["sets"]
    assert (chosen["sampling"]["temperature"], chosen["max_tokens"], chosen["reward"]) == (0.5, 9, "gsm8k")
