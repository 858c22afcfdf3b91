"""An evaluation on a pinned replica, while the other one takes new weights and works for training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.schema import Config
from megarl.queue.transfer import QueueReader
from megarl.weights.sender import WeightSender
from megarl.weights.sync_settings import SyncSettings
from tests.support.checkout import environment
from tests.support.fake_engines import ListExporter
from tests.support.pool import start_pool
from tests.support.tiny import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = SyncSettings(bucket_bytes=20_000, sync_s=120.0, rpc_s=120.0, restarts=0, transport="gloo")


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """The weights as they are in the file, in the order of layers."""
    tensors = load_file(model / "model.safetensors")
    return dict(sorted(tensors.items(), key=lambda item: ("layers." in item[0], item[0])))


def responses(run_dir: Path, label: str) -> list[dict[str, Any]]:
    """The records of an evaluation without the versions of their tokens, which an engine of a file does not know."""
    lines = (run_dir / f"eval_{label}.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "versions"} for line in lines]


def greedy(run_dir: Path, label: str) -> dict[int, tuple[str, int, str]]:
    """The text, the tokens and the end of the greedy response to each problem."""
    return {
        each["index"]: (each["response"], each["response_tokens"], each["finish_reason"])
        for each in responses(run_dir, label)
        if each["mode"] == "greedy"
    }


def evaluate_alone(model: Path, config: Config, run_dir: Path) -> str:
    """Run `megarl eval` on an exported model, as a process of its own; the label of its responses' file."""
    command = [
        sys.executable, "-m", "megarl", "eval", "--model", str(model), "--data", str(config.evaluation.sets[0].path),
        "--max-tokens", str(config.sampling.max_tokens), "--samples", "1", "--reward", config.reward.function,
        "--run-dir", str(run_dir), "reward.workers=1", "timeouts.ray_start_s=400",
    ]  # fmt: skip
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=550, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    (written,) = run_dir.glob("eval_*.jsonl")
    return written.stem.removeprefix("eval_")


def versions(run_dir: Path, label: str) -> set[int]:
    lines = (run_dir / f"eval_{label}.jsonl").read_text().splitlines()
    return {version for line in lines for version, _, _ in json.loads(line)["versions"]}


def test_a_pinned_evaluation_equals_a_stand_alone_one_while_training_goes_on(tmp_path: Path) -> None:
    old, new = make_tiny_model(tmp_path / "old", seed=0), make_tiny_model(tmp_path / "new", seed=1)
    pool = start_pool(
        tmp_path, old, rollout={"replicas": 2, "max_num_seqs": 16}, evaluation={"concurrent": True, "pin": 1},
        admission={"mode": "async", "sync_interval": 1}, sampling={"max_tokens": 200},
    )  # fmt: skip
    try:
        client, run_dir = pool.client, pool.config.run_dir
        client.evaluate(0, "alone")  # with engines that have read the weights, and nothing else to do
        exporter = ListExporter(weights_of(old))
        sender = WeightSender(SETTINGS, exporter)
        sender.connect(client.engine_handles())

        def publish(version: int) -> list[str]:
            kept = client.leave_out()
            client.announce(version)
            sender.publish(version, kept)
            client.set_version(version)
            return kept

        assert publish(0) == []
        client.start_evaluation(0, "pinned")
        exporter.tensors = weights_of(new)
        assert publish(1) == ["replica 1"], "the evaluation ended before the publication began"
        [finished] = client.take_evaluations(wait_s=300)
        assert finished.label == "pinned" and finished.reports[0].of_one_version
        assert versions(run_dir, "pinned") == {0}
        assert responses(run_dir, "pinned") == responses(run_dir, "alone")
        reader = QueueReader.attach(pool.handle.partition, namespace=pool.handle.namespace, timeout_s=60)
        rows = reader.fetch(client.wait_batch(0).keys)
        assert {row.versions[-1].version for row in rows} <= {0, 1}
        client.commit(0, trained=4, filtered=0, dropped_stale=0, failed=0)
        # The pinned replica has missed a version: it serves training after the next publication.
        assert publish(2) == []
        client.evaluate(2, "after")
        assert versions(run_dir, "after") == {2} and responses(run_dir, "after") != responses(run_dir, "alone")
        reader.close()
        sender.close()
    finally:
        pool.close()
    pinned, alone = greedy(pool.config.run_dir, "pinned"), tmp_path / "alone"
    assert len(pinned) == 8 and greedy(alone, evaluate_alone(old, pool.config, alone)) == pinned
