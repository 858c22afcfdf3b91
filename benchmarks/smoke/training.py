"""Steps `parity`, `speed` and `two_ranks`: the policy on the device.

Shape suffixes: R response tokens.
"""

from __future__ import annotations

import faulthandler
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.report import Ratio
from benchmarks.smoke import models
from benchmarks.smoke.rows import Where, row
from benchmarks.smoke.transfers import median_s

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.trainer.policy import Policy

# Largest |log-prob difference|: in fp32 a GPU sums in another order; the random model amplifies bf16 rounding.
DIFFERENCE = {"fp32": 1e-3, "bf16": 0.3}
UPDATES = 6
RAGGED = 50
RANKS_S = 140.0  # for both ranks together; the step that starts them has longer, and ends them


def parity(where: Where) -> tuple[list[Ratio], list[str]]:
    """Compare log-probs with transformers in fp32 on the CPU, of three kinds of models, and train a few updates.

    Two layers of Qwen3-8B's sizes are compared only: a GPU has other kernels for them than for small ones.
    """
    pairs = models.make_pairs(16 if where.tiny else 32, range(8, 42, 3))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        reference = {}
        for family in ("dense", "moe", "delta"):
            models.small_model(Path(folder, family), family=family)
            reference[family] = models.reference_logprobs(Path(folder, family), pairs)
        large = Path(folder, "large")
        large_pairs = models.make_pairs(4, range(8, 42, 9) if where.tiny else range(64, 257, 64))
        models.small_model(large, **large_layers(where))
        large_reference = models.reference_logprobs(large, large_pairs)
        models.join(models.free_address(), 0, 1)
        for family, old in reference.items():
            for precision, allowed in DIFFERENCE.items():
                config = models.make_config(Path(folder, family), trainer={"precision": precision})
                with models.built_policy(config) as policy:
                    rows += _parity_rows(f"{family} {precision}", policy, pairs, old, allowed)
        for precision, allowed in DIFFERENCE.items():
            with models.built_policy(models.make_config(large, trainer={"precision": precision})) as policy:
                worst = float(_differences(policy, large_pairs, large_reference).max())
                rows.append(_difference_row(f"layers of 8B {precision}", worst, allowed))
    return rows, []


def large_layers(where: Where) -> dict[str, Any]:
    """Return the sizes of two of Qwen3-8B's layers; on a CPU narrower ones, with as many query heads per group.

    The small vocabulary leaves the layers to be compared, and weights so small leave the log-probs their size.
    """
    narrow = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2}
    few = {"num_hidden_layers": 2, "vocab_size": models.VOCABULARY, "initializer_range": 0.02}
    return {**models.LAYER_8B, **(narrow if where.tiny else {}), **few}


def _differences(policy: Policy, pairs: models.Pairs, old: list[torch.Tensor]) -> torch.Tensor:
    """Return |log-prob - old log-prob| of all response tokens."""
    found = policy.compute_logprobs(models.make_samples(pairs, old))
    return torch.cat([(new - each).abs() for new, each in zip(found, old, strict=True)])


def _difference_row(name: str, worst: float, allowed: float) -> Ratio:
    return row(f"{name}: difference from transformers' log-probs / allowed", worst, allowed, 1.0, "nat")


def _parity_rows(
    name: str, policy: Policy, pairs: models.Pairs, old: list[torch.Tensor], allowed: float
) -> list[Ratio]:
    samples = models.make_samples(pairs, old)
    differences = _differences(policy, pairs, old)
    losses = [policy.update(samples)["loss"] for _ in range(UPDATES)]
    fell = losses[0] - losses[-1]
    # In bf16 a router of random weights often chooses another expert, and such a token says nothing: the median counts.
    worst = float(differences.quantile(0.5 if name == "moe bf16" else 1.0))
    return [
        _difference_row(name, worst, allowed),
        row(f"{name}: updates whose loss did not fall", float(not fell > 0), 1.0, 0.0, "", {"losses": losses}),
    ]


def speed(where: Where) -> tuple[list[Ratio], list[str]]:
    """Measure bf16 updates at the layer sizes of Qwen3-8B: against a bare matrix product, the plan, and ragged T."""
    sizes = models.SMALL if where.tiny else models.LAYER_8B
    tokens = 256 if where.tiny else 8192
    with tempfile.TemporaryDirectory() as folder:
        models.write_config(Path(folder), sizes)
        models.join(models.free_address(), 0, 1)
        config = models.make_config(
            Path(folder), model={"path": folder, "load_weights": False}, sampling={"max_tokens": tokens},
            trainer={"precision": "bf16", "micro_batch_tokens": tokens, "optimizer": {"lr": 1e-5}},
        )  # fmt: skip
        _reset_peak(where)
        with models.built_policy(config) as policy:
            rows = _speed_rows(where, config, policy, tokens)
            left_out = [] if where.device.type == "cuda" else ["memory against the plan: a CPU does not count tensors"]
            if where.device.type == "cuda":
                rows.append(_memory_row(config, policy))
            rows += _ragged_rows(where, policy, tokens)
    return rows, left_out


def _speed_rows(where: Where, config: Config, policy: Policy, tokens: int) -> list[Ratio]:
    from megarl.run.record.batch_metrics import Performance

    length = tokens // 4
    vocabulary = policy.info.vocab_size
    samples = models.make_samples(models.make_pairs(8, range(length - 12, length - 11), vocabulary))
    median = median_s(where, lambda: policy.update(samples), repeats=1 if where.tiny else 6, warm_up=2)
    trained = sum(sample.length for sample in samples)
    flops = 3 * trained * Performance(config, policy.info).flops_per_token(length / 2)
    product = product_tflops(where)
    details = {"update_s": median, "tokens_per_s": trained / median}
    # Bounds of the device are estimates until the first run: 40% of what one large product reaches.
    return [
        row("rate of a bf16 matrix product / rate of an update", product, flops / median / 1e12,
            200.0 if where.tiny else 2.5, "TFLOP/s", details),
    ]  # fmt: skip


def product_tflops(where: Where) -> float:
    """Return the TFLOP/s of a square bf16 matrix product."""
    size = 256 if where.tiny else 8192
    a = torch.randn(size, size, device=where.device, dtype=torch.bfloat16)
    return 2 * size**3 / median_s(where, lambda: torch.mm(a, a), repeats=7, warm_up=3) / 1e12


def _reset_peak(where: Where) -> None:
    if where.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _memory_row(config: Config, policy: Policy) -> Ratio:
    """Compare the peak of allocated memory with the plan's, without the term for contexts, which are not allocated."""
    from megarl.config.memory_plan.memory import Device, trainer_memory
    from megarl.config.memory_plan.parameters import TrainerRank
    from megarl.models.megatron.layer_spec import use_transformer_engine

    fused = use_transformer_engine()
    rank = TrainerRank.of(config, policy.info, policy.layout, fused=fused)
    plan = trainer_memory(rank, Device(True, fused, None))
    counted = sum(term.bytes for term in plan.terms if term.when in ("always", "update") and "CUDA" not in term.name)
    peak = torch.cuda.max_memory_allocated()
    return row("peak memory of an update / plan", peak / 2**30, counted / 2**30, 1.1, "GiB",
               {"terms": {f"{term.name} ({term.when})": term.bytes for term in plan.terms}})  # fmt: skip


def _ragged_rows(where: Where, policy: Policy, tokens: int) -> list[Ratio]:
    """Update on micro-batches of ever new lengths: kernels that are compiled for each of them would show."""
    from torch._dynamo.utils import counters

    seconds, graphs = [], []
    for number in range(10 if where.tiny else RAGGED):
        length = tokens // 2 + 17 * number % (tokens // 3) + number
        pairs = models.make_pairs(1, range(length - 8, length - 7), policy.info.vocab_size)
        samples = models.make_samples(pairs)
        seconds.append(median_s(where, partial(policy.update, samples), repeats=1, warm_up=0))
        graphs.append(int(counters["stats"]["unique_graphs"]))
    half = len(seconds) // 2
    late = seconds[half:]
    return [
        row("slowest / median of late updates on new lengths", max(late), statistics.median(late),
            20.0 if where.tiny else 3.0, "s"),
        row("graphs compiled in late updates on new lengths", float(graphs[-1] - graphs[half - 1]), 1.0, 0.0, ""),
    ]  # fmt: skip


def two_ranks(where: Where) -> tuple[list[Ratio], list[str]]:
    """Compare log-probs under TP 2 with transformers: two ranks on one device.

    NCCL refuses two ranks on one GPU, so they use gloo, which copies tensors through host memory.
    """
    pairs = models.make_pairs(8, range(8, 42, 3))
    with tempfile.TemporaryDirectory() as folder:
        models.small_model(Path(folder, "model"))
        old = models.reference_logprobs(Path(folder, "model"), pairs)
        arguments = (where.device.type, folder, models.free_address())
        ranks = torch.multiprocessing.spawn(_one_of_two, arguments, nprocs=2, join=False)
        try:
            deadline = time.monotonic() + RANKS_S
            while not ranks.join(1.0):  # it raises when a rank has failed, and ends the other one
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {RANKS_S:.0f} s for two ranks to end")
        finally:
            for rank in ranks.processes:
                rank.kill()
        found: list[torch.Tensor] = torch.load(Path(folder, "logprobs.pt"))
    worst = float(torch.stack([(new - each).abs().max() for new, each in zip(found, old, strict=True)]).max())
    return [
        row("TP 2 on one device, fp32: difference from transformers' log-probs / allowed", worst, 1e-3, 1.0, "nat")
    ], []


def _one_of_two(rank: int, device: str, folder: str, address: str) -> None:
    """Compute log-probs as one of two tensor ranks; rank 0 writes them."""
    faulthandler.dump_traceback_later(RANKS_S - 10)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    models.join(address, rank, 2, backend="gloo")
    parallel: dict[str, Any] = {"tensor": 2, "sequence": False}
    config = models.make_config(
        Path(folder, "model"), trainer={"precision": "fp32", "gpus": 2, "parallel": parallel, "micro_batch_tokens": 512}
    )
    with models.built_policy(config, tensor=2) as policy:
        found = policy.compute_logprobs(models.make_samples(models.make_pairs(8, range(8, 42, 3))))
    if rank == 0:
        torch.save(list(found), Path(folder, "logprobs.pt"))
    torch.distributed.destroy_process_group()
