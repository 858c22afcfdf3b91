"""Mistral 7B: Llama's layers; the first release has sliding-window attention."""

from __future__ import annotations

from megarl.models.families.base import DENSE, Family, sliding_window

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    DENSE,
    lambda raw: {"window": sliding_window(raw)},
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
