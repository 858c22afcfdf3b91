"""The texts of special tokens inside messages, which must not become the tokens. Pure.

What a tool has said is text of somebody else's: a special token's text in it would end the tool's message, and could
begin a turn of the model. It is broken up by a zero-width space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the special tokens; longer ones first, because one may contain another."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = set(tokenizer.all_special_tokens) | {token.content for token in added.values() if token.special}
    return sorted(found, key=len, reverse=True)


def without_specials(message: Mapping[str, Any], specials: Sequence[str]) -> dict[str, Any]:
    """Return a message in whose texts the special tokens' texts are broken up."""
    return {key: _broken_up(value, specials) if isinstance(value, str) else value for key, value in message.items()}


def with_harmless_tools(messages: Sequence[Mapping[str, Any]], specials: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages of a conversation, those of tools `without_specials`."""
    return [without_specials(each, specials) if each.get("role") == "tool" else dict(each) for each in messages]


def _broken_up(text: str, specials: Sequence[str]) -> str:
    for special in specials:
        text = text.replace(special, f"{special[:1]}\u200b{special[1:]}")
    return text
