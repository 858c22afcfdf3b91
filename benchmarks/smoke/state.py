"""Step `state`: saving and resuming tensors of the device, and the reference model's way to the host and back."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.lib.report import Ratio
from benchmarks.smoke import models
from benchmarks.smoke.rows import Where, row
from benchmarks.smoke.transfers import median_s

if TYPE_CHECKING:
    from megarl.config.schema import Config
    from megarl.trainer.policy import Policy


def run(where: Where) -> tuple[list[Ratio], list[str]]:
    """Save, change and resume a policy; time the copies against plain ones."""
    sizes = {} if where.tiny else {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8}
    with tempfile.TemporaryDirectory() as folder:
        models.write_config(Path(folder), {**models.SMALL, **sizes})
        models.join(models.free_address(), 0, 1)
        config = models.make_config(
            Path(folder), model={"path": folder, "load_weights": False}, trainer={"precision": "bf16"},
            checkpoint={"dir": Path(folder, "checkpoints")},
        )  # fmt: skip
        with models.built_policy(config) as policy:
            rows, left_out = _save_rows(where, config, policy)
            rows += _offload_rows(where, policy)
    return rows, left_out


def trainer_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    """Return weights, fp32 main weights and Adam's moments."""
    from megarl.checkpoint.save.training_state import inner_optimizers

    found = {name: each for chunk in policy.module_chunks for name, each in chunk.named_parameters()}
    for number, inner in enumerate(inner_optimizers(policy.optimizer)):
        groups = inner.optimizer.param_groups
        parameters = [each for group in groups for each in group["params"]]
        found |= {f"main {number} {i}": each for i, each in enumerate(parameters)}
        for i, each in enumerate(parameters):
            state = inner.optimizer.state[each]
            found |= {f"{name} {number} {i}": state[name] for name in ("exp_avg", "exp_avg_sq")}
    return {name: each.detach() for name, each in found.items()}


def _save_rows(where: Where, config: Config, policy: Policy) -> tuple[list[Ratio], list[str]]:
    from megarl.checkpoint.save.checkpointer import Checkpointer
    from megarl.checkpoint.save.training_state import load_trainer_state, trainer_numbers

    samples = models.make_samples(models.make_pairs(4, range(20, 24)))
    policy.update(samples)
    gloo = torch.distributed.new_group(backend="gloo")
    said: list[str] = []
    checkpointer = Checkpointer(config, policy, gloo, said.append)
    saved = {name: each.cpu().clone() for name, each in trainer_tensors(policy).items()}
    state_B = sum(each.numel() * each.element_size() for each in saved.values())
    numbers = trainer_numbers(policy)
    where.synchronize()
    _require(checkpointer.save(1, {}, wait=True), said)
    # The first save allocates the pinned memory that later ones use again.
    where.synchronize()
    started = time.perf_counter()
    checkpointer.save(2, {}, wait=False)
    stall = time.perf_counter() - started
    _require(checkpointer.save(3, {}, wait=True), said)
    policy.update(samples)
    changed = sum(not torch.equal(each.cpu(), saved[name]) for name, each in trainer_tensors(policy).items())
    load_trainer_state(policy, checkpointer.directory.path(3), numbers, with_rng=True)
    wrong = sum(not torch.equal(each.cpu(), saved[name]) for name, each in trainer_tensors(policy).items())
    everything = list(trainer_tensors(policy).values())
    homes = [torch.empty_like(each, device="cpu", pin_memory=where.device.type == "cuda") for each in everything]
    plain = median_s(where, lambda: [h.copy_(e, non_blocking=True) for h, e in zip(homes, everything, strict=True)])
    rows = [
        row("tensors that differ after a resume", float(wrong), 1.0, 0.0, "", {"tensors": len(saved)}),
        row("tensors that an update left as they were / all", float(len(saved) - changed), float(len(saved)), 0.5, ""),
        # Planning a save takes fixed time, which the small state of a CPU does not hide.
        row("a save's stall / plain copy to pinned host memory", stall, plain, 1000.0 if where.tiny else 5.0, "s",
            {"bytes": state_B}),
    ]  # fmt: skip
    return rows, []


def _require(saved: bool, said: list[str]) -> None:
    if not saved:
        raise RuntimeError(f"a save failed: {'; '.join(said)}")


def _offload_rows(where: Where, policy: Policy) -> list[Ratio]:
    """Move frozen modules to host memory and back, as the reference model does around its forward passes."""
    from megarl.trainer.reference_policy import Placement

    width = 64 if where.tiny else 4096
    modules = [torch.nn.Linear(width, width, bias=False, device=where.device) for _ in range(8)]
    before = [module.weight.detach().cpu().clone() for module in modules]
    placement = Placement(modules, where.device, "cpu_offload")
    homes = [torch.empty_like(each, pin_memory=where.device.type == "cuda") for each in before]
    wrong = 0

    def round_trip() -> None:
        nonlocal wrong
        with placement.resident():
            wrong += sum(module.weight.device.type != where.device.type for module in modules)
            where.synchronize()

    seconds = median_s(where, round_trip)
    with placement.resident():
        wrong += sum(not torch.equal(m.weight.detach().cpu(), b) for m, b in zip(modules, before, strict=True))
    outside = {module.weight.device.type for module in modules}
    wrong += outside != {"cpu"}
    plain = median_s(where, lambda: [home.to(where.device, non_blocking=True) for home in homes])
    return [
        row("offloaded tensors in the wrong place or changed", float(wrong), 1.0, 0.0, ""),
        row("reference to the device and back / plain copies", seconds, plain, 100.0 if where.tiny else 1.5, "s"),
    ]
