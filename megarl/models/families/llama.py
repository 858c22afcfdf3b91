"""Llama 2 and 3."""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import DENSE, Family, no_attention_bias


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    return {}


FAMILY = Family("llama", "LlamaForCausalLM", DENSE, _read)
