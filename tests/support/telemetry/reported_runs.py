"""Run directories for `megarl report`: the files of a run with as many steps as a test wants, made from a formula."""

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec
import yaml

from megarl.common.process.processes import ProcessId
from megarl.common.rundir.run_lock import CLAIM_FILE, Holder
from megarl.report.reading.metrics_file import MetricsReader, RunMetrics

START = 1_795_600_000.0  # Unix seconds

CONFIG = {
    "run": {"name": "made", "steps": 200},
    "trainer": {"gpus": 8, "parallel": {"tensor": 2, "pipeline": 1}},
    "rollout": {"replicas": 4, "tensor_parallel": 2},
    "admission": {"mode": "async"},
}


def step_line(step: int, **changes: float | None) -> dict[str, float | None]:
    """The metrics of one step; `changes` by name with `__` for a slash."""
    reward = 0.9 - 0.6 * math.exp(-step / 60) + 0.03 * math.sin(step)
    line: dict[str, float | None] = {
        "step": step, "wall_time": START + 10.0 * step, "reward/mean": reward, "reward/std": 0.4, "reward/stderr": 0.03,
        "reward/accuracy": reward, "reward/component/correct": reward, "reward/component/format": 1.0,
        "groups/trained": 28.0, "groups/filtered": 4.0, "monitor/no_signal_share": 0.125,
        "groups/failed": 0.0, "groups/dropped_stale": 0.0, "groups/solve_all": 0.1,
        "groups/solve_none": 0.05, "batch/samples": 256.0, "batch/response_tokens": 256_000.0,
        "batch/reused_tokens": 0.0, "batch/trained_tokens": 300_000.0, "batch/staleness_mean": 1.5,
        "batch/staleness_max": 3.0, "batch/dp_imbalance": 1.02, "batch/failed_samples": 0.0,
        "rollout/response_length_mean": 1000.0 + step % 50, "rollout/response_length_min": 20.0,
        "rollout/response_length_max": 4096.0, "rollout/response_length_p10": 200.0,
        "rollout/response_length_p50": 900.0, "rollout/response_length_p90": 2500.0,
        "rollout/response_length_p99": 4000.0, "rollout/truncated_share": 0.02, "rollout/aborted_share": 0.0,
        "rollout/version_lag_tokens/0": 60_000.0, "rollout/version_lag_tokens/1": 150_000.0,
        "rollout/version_lag_tokens/2": 46_000.0, "rollout/queue_depth": float(step % 7),
        "rollout/idle_ratio": 0.1, "rollout/engine_seconds": 9.0, "rollout/kv_usage_max": 0.7,
        "rollout/generate_seconds_p50": 4.0, "rollout/generate_seconds_p99": 9.0, "rollout/generate_seconds_max": 9.5,
        "rollout/replica_tokens_per_second_min": 7000.0, "rollout/replica_tokens_per_second_max": 7200.0,
        **{f"rollout/replica_tokens_per_second/{replica}": 7000.0 + 50 * replica for replica in range(4)},
        "policy/entropy": 0.5 + 0.1 * math.cos(step / 30), "policy/grad_norm": 0.3, "policy/clip_fraction": 0.01,
        "policy/loss": -0.02 + 0.01 * math.sin(step), "policy/lr": 1e-6 * (1 - step / 10_000), "policy/ess": 0.98,
        "policy/approx_kl": 1e-4, "mismatch/ess": 0.97, "perf/trainer_peak_memory_gib": 40.0,
        "mismatch/k3_kl": 1e-3, "time/step": 10.0, "time/generate": 1.0, "time/queue": 0.1, "time/logprobs": 2.0,
        "time/update": 5.0, "time/drain": 0.0, "time/sync": 1.0, "time/eval": 0.0, "time/save": 0.0, "time/other": 0.9,
        "time/trainer_idle_ratio": 0.1, "perf/trainer_tokens_per_second": 42_000.0,
        "perf/rollout_tokens_per_second": 28_000.0, "perf/tokens_per_second": 30_000.0,
        "total/wall_seconds": 10.0 * step,
    }  # fmt: skip
    return line | {name.replace("__", "/"): value for name, value in changes.items()}


def evaluation_line(step: int, greedy: float, name: str = "heldout") -> dict[str, float]:
    """The metrics of one evaluation of 600 problems."""
    half = 1.96 * math.sqrt(greedy * (1 - greedy) / 600)
    values = {"greedy": greedy, "greedy_low": greedy - half, "greedy_high": greedy + half, "n": 600}
    values |= {"sampled": greedy, "sampled_low": greedy - half / 2, "sampled_high": greedy + half / 2}
    return {
        "step": step,
        "wall_time": START,
        "eval/step": step,
        **{f"eval/{name}/{key}": value for key, value in values.items()},
    }


def sample_line(step: int, index: int = 0, **changes: Any) -> dict[str, Any]:
    """One line of samples.jsonl."""
    line = {
        "step": step, "group_id": step, "sample_index": index, "prompt": f"What is {step} + {index}?",
        "response": f"It is {step + index}.", "reference": str(step + index), "reward": float(index % 2),
        "reward_components": {"correct": float(index % 2)}, "finish_reason": "stop",
        "response_tokens": 100 + (37 * step + 11 * index) % 900,
        "versions": [{"version": step - 1, "start": 0, "end": 10}], "status": "ok", "failure": "", "reward_error": "",
    }  # fmt: skip
    return line | changes


def write_run(
    run_dir: Path,
    lines: list[dict[str, Any]],
    samples: list[dict[str, Any]] = (),
    config: Any = CONFIG,  # type: ignore[assignment]
) -> Path:
    """Write a run directory with these metrics and samples, which this process holds; return it."""
    run_dir.mkdir(parents=True)
    (run_dir / CLAIM_FILE).write_bytes(msgspec.json.encode(Holder.here("a test", ProcessId.of(os.getpid()))))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return run_dir


def small_run(run_dir: Path, steps: int = 40, **changes: float | None) -> Path:
    """A run of some steps with two evaluations and two samples per step; `changes` as of `step_line`."""
    lines: list[dict[str, Any]] = [evaluation_line(0, 0.25)]
    lines += [step_line(step, **changes) for step in range(1, steps + 1)]
    lines.append(evaluation_line(steps, 0.75))
    samples = [sample_line(step, index) for step in range(1, steps + 1) for index in range(2)]
    return write_run(run_dir, lines, samples)


def write_long_run(run_dir: Path, steps: int, peak_at: int) -> Path:
    """A run of very many steps as a real one writes it, with 16 engines and unknown metrics; one peak of the reward.

    A line has about 4 KB. The text of a line is made once, and only numbers are put into it.
    """
    write_run(run_dir, [])
    engines = {f"rollout/replica_tokens_per_second/{replica}": 7000.0 + replica for replica in range(16)}
    others = {f"mismatch/of_another_version_{number}": 0.123456789012345 for number in range(12)}
    fixed = json.dumps(step_line(0) | engines | others)
    varied = ("step", "wall_time", "reward/mean", "total/wall_seconds", "time/step")
    for name in varied:
        fixed = fixed.replace(f'"{name}": {json.dumps(step_line(0)[name])}', f'"{name}": %({name})r', 1)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            reward = 17.0 if step == peak_at else 0.5 + 0.25 * math.sin(step / 1000)
            values = {"step": step, "wall_time": START + 10.0 * step, "reward/mean": reward, "time/step": 9 + step % 3}
            file.write(fixed % (values | {"total/wall_seconds": 10.0 * step}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps(evaluation_line(step, 0.5)) + "\n")
    text = "x" * 200
    with (run_dir / "samples.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(sample_line(step, response=text)) + "\n")
    return run_dir


def metrics_of(lines: list[dict[str, Any]], buckets: int = 800) -> RunMetrics:
    """The metrics of these lines, which come in small chunks."""
    reader = MetricsReader(buckets)
    for start in range(0, len(lines), 7):
        reader.add(lines[start : start + 7])
    return reader.result()
