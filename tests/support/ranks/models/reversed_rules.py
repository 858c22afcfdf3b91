"""Each mapping rule broken in turn: every one must move the log-probs of a loaded model, so that none goes unseen."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry, Piece
from megarl.models.families import FAMILIES
from megarl.models.megatron import shards
from tests.support.ranks.models import models
from tests.support.ranks.models.layouts import make_layout, use_layout


def expanding(mutate: Callable[[Entry], Entry]) -> Any:
    """Every table made inside has its entries mutated."""
    original = shards.expand

    def expand(rules: Any, info: ModelInfo) -> Iterator[Entry]:
        return map(mutate, original(rules, info))

    return patch.object(shards, "expand", expand)


def active_rules(info: ModelInfo) -> list[str]:
    """Megatron name templates of the rules that this model is made by, in the order of the family's table."""
    return list(dict.fromkeys(entry.rule.megatron for entry in shards.expand(FAMILIES[info.family].rules, info)))


def _last_first(rule: str) -> Callable[[Entry], Entry]:
    """Rows (or columns, where tensor parallelism cuts them, or of a single row) of what one rule makes, last first."""

    def mutate(entry: Entry) -> Entry:
        if entry.rule.megatron != rule:
            return entry
        single = entry.shapes[0][0] == 1
        pieces = [Piece(0, 0, entry.shapes[0][1])] if single else entry.pieces(0, 1)
        rows = [Piece(p.source, i, i + 1) for p in pieces for i in range(p.start, p.stop)]
        axis = 1 if single else entry.rule.axis
        broken = replace(
            entry.rule, axis=axis, arrange=lambda info: rows[::-1], per_source=False, sections=None, pad_to_tp=False
        )
        return replace(entry, rule=broken)

    return mutate


def reversed_logprobs(model_dir: str, batch: list[list[list[int]]], rules: list[str]) -> dict[str, list[torch.Tensor]]:
    """Log-probs of the batch with each of `rules` broken in turn, on whole models; ranks share the rules."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout, answers = make_layout(), {}
    with use_layout(layout):
        for rule in rules[rank::size]:
            with expanding(_last_first(rule)):
                info, _, chunks = models.load(model_dir, layout)
            answer = models.forward_logprobs(info, layout, chunks, batch)
            assert answer is not None
            answers[rule] = answer
    return answers
