#!/usr/bin/env python3
"""A first test on a machine with a CUDA device: the trainer on one GPU, compared with transformers on the CPU.

    python benchmarks/gpu_smoke.py [--json FILE] [--device cuda|cpu] [--steps N]

A small seeded Qwen3 on one rank: compares the policy's log-probs in fp32 and in bf16 with transformers in fp32 on the
CPU, runs a few updates on one batch (the loss has to decrease), and measures the time of an update. Prints the device's
name, for docs/gpu.md. `--device cpu` runs the same on the CPU platform, which tests this script itself.

Shape suffixes: R response tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Largest |log-prob difference|: in fp32 a GPU sums in another order; the random model amplifies bf16 rounding.
BOUNDS = {"fp32": 1e-3, "bf16": 0.3}
VOCABULARY = 512


def make_model(directory: Path) -> None:
    """Write a seeded random Qwen3 in Hugging Face format."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, initializer_range=0.1)).save_pretrained(directory)


def make_batch(count: int = 32) -> list[tuple[list[int], list[int]]]:
    """Return `count` pairs of prompt and response token ids of different lengths."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    return [(draw(4 + i % 7), draw(8 + 3 * (i % 11))) for i in range(count)]


def reference_logprobs(directory: Path, batch: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Return each sample's log-probs, float32 [R], by transformers in fp32 on the CPU.

    Has to be called before a platform is activated.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    with torch.no_grad():
        for prompt, response in batch:
            logits_RV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            results.append(logits_RV.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return results


def run(precision: str, directory: Path, reference: list[torch.Tensor], steps: int) -> dict[str, Any]:
    """Build the policy, compare its log-probs and run updates; needs an initialised process group."""
    from megarl import platforms
    from megarl.config.schema import Config
    from megarl.models.layout import Layout
    from megarl.models.read_config import load_info
    from megarl.trainer import parallel
    from megarl.trainer.policy import Policy, TrainSample

    config = Config.model_validate(
        {
            "run": {"steps": steps},
            "model": {"path": directory},
            "trainer": {"precision": precision, "micro_batch_tokens": 1024, "optimizer": {"lr": 1e-3}},
            "batch": {"groups": 8, "samples_per_group": 4},
            "sampling": {"max_tokens": 64},
            "data": {"path": "unused.jsonl"},
        }
    )
    layout = Layout()
    parallel.initialize(layout, seed=0, timeout_s=120)
    policy = Policy(config, layout, load_info(directory))
    samples = [
        TrainSample(str(i), prompt, response, streams={"old_logprobs": reference[i]})
        for i, (prompt, response) in enumerate(make_batch())
    ]
    for i, sample in enumerate(samples):
        sample.set_advantage((-1.0) ** i)
    found = policy.compute_logprobs(samples)
    difference = max(float((new.logprobs_R - old).abs().max()) for new, old in zip(found, reference, strict=True))
    losses, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(policy.update(samples)["loss"])
        if platforms.current().is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    parallel.destroy()
    tokens = sum(sample.length for sample in samples)
    return {
        "name": f"gpu_smoke {precision} max |log-prob difference|",
        "ratio": round(difference / BOUNDS[precision], 6),
        "bound": 1.0,
        "ok": difference <= BOUNDS[precision] and losses[-1] < losses[0],
        "details": {
            "difference": difference,
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "update_s": round(statistics.median(seconds[1:]), 5),
            "tokens_per_second": round(tokens / statistics.median(seconds[1:]), 1),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=6, help="updates, at least 3")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("gpu_smoke: no CUDA device; --device cpu runs the same on the CPU platform\n")
        return 2
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        reference = reference_logprobs(Path(folder), make_batch())
        from megarl import platforms

        platform = platforms.activate()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        torch.distributed.init_process_group(platform.backend, init_method=address, rank=0, world_size=1)
        rows = [run(precision, Path(folder), reference, max(3, options.steps)) for precision in BOUNDS]
    device = torch.cuda.get_device_name() if platform.is_cuda else "CPU"
    for row in rows:
        row["details"]["device"] = device
        print(f"{row['name']:<42} {row['ratio']:8.4f}  bound {row['bound']:.1f}  {'ok' if row['ok'] else 'FAILED'}")
        print(f"    {row['details']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
