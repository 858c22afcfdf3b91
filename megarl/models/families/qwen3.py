"""Dense Qwen3: RMSNorm on each query and key head; head_dim is independent of the hidden size."""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import DENSE, Family, no_attention_bias


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    return {"qk_norm": True, "head_dim": int(raw.get("head_dim") or 128)}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", DENSE, _read, defaults={"num_key_value_heads": 32})
