"""Chooses what `auto` stands for: recomputation and the size of micro-batches, by the memory plan. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.megatron_defaults import Recompute, passes_recompute
from megarl.config.memory import trainer_memory
from megarl.config.schema import Config
from megarl.models.info import ModelInfo
from megarl.models.layout import Layout

FREE = 0.1  # share of the device memory that the plan must leave
TOKENS_STEP = 1024
# Larger micro-batches gain nothing measurable: their matrices fill a GPU long before.
MOST_TOKENS = 65536
UNKNOWN_MEMORY_TOKENS = 8192


@dataclass(frozen=True)
class Device:
    """The trainer's device as the plan sees it; `limit`: its memory in bytes, None if unknown."""

    cuda: bool
    fused: bool
    limit: int | None


def resolve(config: Config, info: ModelInfo, layout: Layout, device: Device, longest: int) -> Config:
    """Return `config` with a value for each `auto` under `trainer`. `longest`: tokens of the longest sample.

    Recomputation is the cheapest that leaves a tenth of the memory free: none, selective, the first n layers of each
    stage (the smallest n), all layers. A micro-batch gets the most tokens that leave as much with that recomputation,
    and at least the longest sample. Without a GPU nothing is recomputed; on GPUs of unknown memory every layer is.
    """
    wants_tokens = config.trainer.micro_batch_tokens == "auto"
    if wants_tokens:
        config = with_trainer(config, micro_batch_tokens=longest)
    if config.trainer.recompute == "auto" and not passes_recompute(config):
        config = with_trainer(config, recompute=_cheapest(config, info, layout, device))
    if wants_tokens:
        least = longest if device.limit is not None else max(longest, UNKNOWN_MEMORY_TOKENS)
        config = with_trainer(config, micro_batch_tokens=most_tokens(config, info, layout, device) or least)
    return config


def with_trainer(config: Config, **fields: object) -> Config:
    """Return `config` with other fields of the section `trainer`."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=fields)})


def most_tokens(config: Config, info: ModelInfo, layout: Layout, device: Device) -> int | None:
    """Return the most tokens of a micro-batch that leave a tenth of the memory free, in steps of TOKENS_STEP.

    It is at least `trainer.micro_batch_tokens`. None if even that does not fit, or if the memory is unknown.
    """
    least = config.trainer.token_limit

    def fits(tokens: int) -> bool:
        return _fits(with_trainer(config, micro_batch_tokens=tokens), info, layout, device)

    if device.limit is None or not fits(least):
        return None
    steps = range(-(-least // TOKENS_STEP) * TOKENS_STEP, MOST_TOKENS + 1, TOKENS_STEP)
    passed = _first(len(steps), lambda index: not fits(steps[index]))
    return steps[passed - 1] if passed else least


def _cheapest(config: Config, info: ModelInfo, layout: Layout, device: Device) -> Recompute:
    if device.limit is None:
        return "full" if device.cuda else "none"

    def fits(kind: Recompute) -> bool:
        return _fits(with_trainer(config, recompute=kind), info, layout, device)

    if fits("none"):
        return "none"
    if fits("selective"):
        return "selective"
    layers = info.num_layers // (layout.pipeline * (layout.virtual_pipeline or 1))
    # The more layers are recomputed, the less is kept.
    count = 1 + _first(layers - 1, lambda index: fits(index + 1))
    return count if count < layers else "full"


def _fits(config: Config, info: ModelInfo, layout: Layout, device: Device) -> bool:
    memory = trainer_memory(config, info, layout, cuda=device.cuda, fused=device.fused, limit=device.limit)
    return memory.limit is not None and memory.peak <= (1 - FREE) * memory.limit


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first index below `count` for which `holds` is true, else `count`. `holds` changes once, to true."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
