"""The supported model families. A new family is a file of declarations, listed here (docs/development.md)."""

from megarl.models.families import (
    deepseek_v3,
    glm4_moe,
    mistral,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
)
from megarl.models.families.base import Family

_MODULES = (
    deepseek_v3,
    glm4_moe,
    mistral,
    qwen2_5_vl,
    qwen3,
    qwen3_moe,
)
_ALL = (
    *(module.FAMILY for module in _MODULES),
    glm4_moe.LITE_FAMILY,
    mistral.LLAMA_FAMILY,
    mistral.MIXTRAL_FAMILY,
    qwen3.QWEN2_FAMILY,
    qwen3_5.DENSE_FAMILY,
    qwen3_5.MOE_FAMILY,
    qwen3_5.NEXT_FAMILY,
    qwen3_vl.DENSE_FAMILY,
    qwen3_vl.MOE_FAMILY,
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
