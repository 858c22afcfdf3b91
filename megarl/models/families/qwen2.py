"""Qwen2 and Qwen2.5: biases on q, k and v; the small models tie their embeddings."""

from megarl.models.families.base import DENSE, Family

FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", DENSE, lambda raw: {"qkv_bias": True}, defaults={"num_key_value_heads": 32}
)
