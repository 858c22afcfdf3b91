"""Dense Qwen2, Qwen2.5 and Qwen3.

Qwen2 has biases on q, k and v; the small models tie their embeddings. Qwen3 has RMSNorm on each query and key head, and
its head_dim is independent of the hidden size.
"""

from collections.abc import Mapping
from typing import Any

from megarl.models.families.base import DENSE, Family, no_attention_bias


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    no_attention_bias(raw)
    return {"qk_norm": True, "head_dim": int(raw.get("head_dim") or 128)}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", DENSE, _read, defaults={"num_key_value_heads": 32})
QWEN2_FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", DENSE, lambda raw: {"qkv_bias": True}, defaults={"num_key_value_heads": 32}
)
