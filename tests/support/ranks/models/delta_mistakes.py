"""Models with Gated DeltaNet with one mistake each, which must show in their log-probs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer.attention import Attention

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry, Piece
from megarl.models.megatron.delta_net import GatedDeltaNet
from megarl.models.megatron.layer_spec import RMSNorm, ZeroCenteredRMSNorm
from tests.support.ranks.models import models
from tests.support.ranks.models.layouts import make_layout, use_layout
from tests.support.ranks.models.reversed_rules import expanding

Batch = list[list[list[int]]]


def _without_borders() -> AbstractContextManager[Any]:
    by_torch = GatedDeltaNet._by_torch

    def as_one_sequence(*arguments: Any) -> torch.Tensor:
        *others, bounds = arguments
        return by_torch(*others, bounds[[0, -1]])

    return patch.object(GatedDeltaNet, "_by_torch", as_one_sequence)


def _values_and_gates_swapped() -> AbstractContextManager[Any]:
    def swapped(info: ModelInfo) -> list[Piece]:
        assert info.delta is not None
        keys, values, heads = info.delta.keys, info.delta.values, info.delta.value_heads
        rows = [Piece(0, 0, 2 * keys), Piece(1, 0, values), Piece(0, 2 * keys, 2 * keys + values)]
        return [*rows, Piece(2, 0, heads), Piece(3, 0, heads)]

    def mutate(entry: Entry) -> Entry:
        mine = entry.megatron.endswith("in_proj.weight")
        return replace(entry, rule=replace(entry.rule, arrange=swapped)) if mine else entry

    return expanding(mutate)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no borders": _without_borders,
    "no gate of attention": lambda: patch.object(Attention, "_apply_output_gate", lambda self, x, gate: x),
    "plain norms": lambda: patch.object(ZeroCenteredRMSNorm, "forward", RMSNorm.forward),
    "values and gates swapped": _values_and_gates_swapped,
}


def mistaken_logprobs(model_dir: str, batch: Batch) -> dict[str, list[torch.Tensor]]:
    """Log-probs of the batch with each mistake in turn, on whole models; ranks share the mistakes."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout, answers = make_layout(), {}
    with use_layout(layout):
        for name in list(MISTAKES)[rank::size]:
            with MISTAKES[name]():
                info, _, chunks = models.load(model_dir, layout)
                answer = models.forward_logprobs(info, layout, chunks, batch)
            assert answer is not None
            answers[name] = answer
    return answers
