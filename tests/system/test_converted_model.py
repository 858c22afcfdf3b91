"""A converted checkpoint becomes one that an engine serves: import, train, export, evaluate, each by its command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT, environment, torchrun
from tests.support.models.quantized import quantized_model
from tests.support.models.tensors import differing
from tests.support.runs.run import tiny_config, train

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONVERT = str(ROOT / "tools/checkpoint/convert.py")


def call(*command: str) -> str:
    """Standard output of a command; AssertionError with what it said if it fails."""
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_converted_model_trains_and_its_checkpoint_is_served(tmp_path: Path, family: str) -> None:
    config: dict[str, Any] = tiny_config(tmp_path, family=family, steps=2)
    arguments = [CONVERT, "import", "--hf", config["model"]["path"], "--out", str(tmp_path / "megatron")]
    said = call(*torchrun(2, *arguments))
    assert said.count("GB/s") == 1  # of rank 0
    config["model"]["path"] = str(tmp_path / "megatron")
    config["checkpoint"] = {"every": 2}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    difference = run.summary["logprob_abs_diff"]
    for when in ("first", "last"):
        assert difference[when]["mean"] <= 1e-5 and difference[when]["max"] <= 1e-4, difference
    step = run.directory / "checkpoints" / "iter_0000002"
    call(sys.executable, CONVERT, "export", "--megatron", str(step), "--hf", str(tmp_path / "exported"))
    assert differing(run.directory / "hf", tmp_path / "exported") == []
    report = tmp_path / "report.json"
    call(
        sys.executable, "-m", "megarl", "eval", "--model", str(tmp_path / "exported"),
        "--data", str(tmp_path / "heldout.jsonl"), "--reward", "tests.support.rewards.reward_functions:digit_share",
        "--samples", "2", "--max-tokens", "12", "--run-dir", str(tmp_path / "eval"), "--json", str(report),
    )  # fmt: skip
    (found,) = json.loads(report.read_text())["sets"]
    assert found["greedy"]["mean@1"]["value"] == pytest.approx(run.summary["eval_after"]["greedy"], abs=1e-6)


def test_a_run_starts_from_quantised_files(tmp_path: Path) -> None:
    """Its engines are plain: their log-probs are those of the trainer, which reads the same numbers."""
    config: dict[str, Any] = tiny_config(tmp_path, steps=1)
    quantised, _ = quantized_model(tmp_path / "moe", "qwen3_moe", "fp8")
    config["model"]["path"] = str(quantised)
    config["trainer"]["parallel"] = {"expert": 2}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    difference = run.summary["logprob_abs_diff"]["first"]
    assert difference["mean"] <= 1e-5 and difference["max"] <= 1e-4, difference
    assert "quantization_config" not in json.loads((run.directory / "hf/config.json").read_text())
