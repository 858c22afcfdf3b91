"""Decodes token ids to the text that reward functions get."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDecoder:
    """Decodes with a tokenizer of its own, so that one thread may decode while another one encodes.

    Calls of transformers that encode change settings of their tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._library = library_tokenizer(self._tokenizer)

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of sequences of token ids, without special tokens."""
        if self._library is not None:
            # Directly, because transformers looks at every token id first, and because this lets other threads run.
            texts: list[str] = self._library.decode_batch(sequences, skip_special_tokens=True)
            return texts
        return [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in sequences]


def library_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401  # the library has no types
    """Return the tokenizer of the `tokenizers` library that encodes and decodes for `tokenizer`, if there is one.

    Its `encode` equals a call of `tokenizer` as long as it neither pads nor truncates.
    """
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens:
        return None
    unchanged = all(
        getattr(own, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode", "__call__", "_encode_plus")
    )
    return tokenizer.backend_tokenizer if unchanged else None
