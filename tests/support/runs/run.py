"""Whole runs as a user starts them: torchrun on a config file, in a directory of the test's."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from tests.support.checkout import ROOT, torchrun
from tests.support.models.chat_templates import CHATML_TOOLS
from tests.support.models.tiny import make_tiny_model
from tests.support.pool.leftovers import marked

# Bounds of |engine - trainer| of log-probs in a run on policy in fp32: the mean and the largest of a step.
ON_POLICY_MEAN, ON_POLICY_MAX = 1e-5, 1e-4
ENTRY = (str(ROOT / "examples/rl/train_rl.py"),)


@dataclass(frozen=True)
class Run:
    """A finished torchrun: its exit code, what the terminal showed, and its run directory."""

    code: int
    output: str
    directory: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Step records of metrics.jsonl (evaluations left out); a line that is cut short is an error here."""
        return _steps((self.directory / "metrics.jsonl").read_text().splitlines())


def step_records(run_dir: Path) -> list[dict[str, Any]]:
    """Step records so far of a run that may still be writing its metrics.jsonl, or not have begun."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return _steps([line for line in lines if line.endswith("}")])


def _steps(lines: list[str]) -> list[dict[str, Any]]:
    return [record for record in map(json.loads, lines) if "time/step" in record]


def tiny_config(directory: Path, *, family: str = "qwen3", steps: int = 2, **model: Any) -> dict[str, Any]:
    """A config whose model and data lie in `directory`; its reward (share of digits) varies within any group."""
    make_tiny_model(directory / "model", family=family, **model)
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(3, 11) for b in range(2, 9)]
    for name, part in (("train", problems[8:]), ("heldout", problems[:8])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {
        "run": {"name": "tiny", "dir": str(directory / "run"), "steps": steps},
        "model": {"path": str(directory / "model")},
        "data": {"path": str(directory / "train.jsonl")},
        "trainer": {"gpus": 2, "precision": "fp32", "micro_batch_tokens": 256, "optimizer": {"lr": 1e-3}},
        "batch": {"groups": 4, "samples_per_group": 4},
        "sampling": {"max_tokens": 12},
        "reward": {"function": "tests.support.rewards.reward_functions:digit_share"},
        "evaluation": {"sets": [{"name": "heldout", "path": str(directory / "heldout.jsonl")}]},
        "rollout": {"max_num_seqs": 32},
        "checkpoint": {"every": 0},
        "timeouts": {"rpc_s": 60, "generate_s": 180, "weight_sync_s": 120, "save_s": 120, "engine_start_s": 900},
    }


def second_thoughts(directory: Path, *, steps: int = 2, **model: Any) -> tuple[dict[str, Any], Any]:
    """The config of a run of two turns with a tool between them, and its tokenizer."""
    config = tiny_config(directory, steps=steps, **model)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = CHATML_TOOLS.replace("{{ tools | tojson }}", "{{ tools[0]['function']['name'] }}")
    tokenizer.save_pretrained(directory / "model")
    config["agent"] = {
        "loop": "examples.rl.agents.second_thoughts:SecondThoughts",
        "kwargs": {"tool": "digits", "first_tokens": 8},
        "tool_format": "hermes",
    }
    config["tools"] = [{"kind": "examples.rl.agents.digits:Digits"}]
    config["sampling"]["max_tokens"] = 128
    config["trainer"]["micro_batch_tokens"] = 1024
    return config, tokenizer


def train(config: dict[str, Any], *overrides: str, ranks: int = 2, timeout: float = 900.0) -> Run:
    """Start torchrun on `config` and wait for its end."""
    directory = Path(config["run"]["dir"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.parent / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    process = start(path, *overrides, ranks=ranks)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        raise AssertionError(f"the run did not end within {timeout:.0f} s:\n{output[-4000:]}") from None
    return Run(process.returncode, output, directory)


def start(
    config: Path, *overrides: str, ranks: int = 2, restarts: int = 0, script: Sequence[str] = ENTRY
) -> subprocess.Popen[str]:
    """torchrun in a session of its own; stdout and stderr together in its pipe."""
    command = torchrun(ranks, "--max-restarts", str(restarts), *script, "--config", str(config), *overrides)
    chosen = [each.removeprefix("run.dir=") for each in overrides if each.startswith("run.dir=")]
    return popen(command, chosen[-1] if chosen else yaml.safe_load(config.read_text())["run"]["dir"])


def popen(
    command: Sequence[str], run_dir: Path | str, *, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A command that makes a run, in a session of its own; stdout and stderr together in its pipe."""
    return subprocess.Popen(
        command, cwd=cwd, env=env or marked(run_dir), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
