"""The supported families. A new one is one file of declarations, listed here."""

from __future__ import annotations

from megarl.models.families import llama, qwen2, qwen3, qwen3_moe
from megarl.models.families.base import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)
}
