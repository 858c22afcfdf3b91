"""Demonstrations: prompts with a response from the data file, as the token ids that the model would have produced.

The response is the text of `data.demonstration_field`, encoded by itself, and the token that ends an assistant's turn.
It follows the prompt as `PromptEncoder` makes it, generation prompt included.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.chat.formats import Prompt
from megarl.chat.tokenize import PromptEncoder, PromptTooLongError, end_of_turn_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShownResponse:
    """The token ids of a prompt and of the response to it, with the token that ends it."""

    prompt_ids: list[int]
    response_ids: list[int]


class DemonstrationEncoder:
    """Makes demonstrations of prompts whose rows have one; `prompts` encodes the prompts themselves.

    `max_tokens`: the longest response, its end included; what happens to longer ones is as for longer prompts.
    `skipped` counts those that were left out.
    """

    def __init__(self, prompts: PromptEncoder, end: int, max_tokens: int) -> None:
        self._prompts, self._end, self._max_tokens = prompts, end, max_tokens
        self.skipped = 0

    def encode(self, prompt: Prompt) -> ShownResponse:
        """Return the demonstration of a row. Raises PromptTooLongError if its prompt or its response is too long."""
        response = self._prompts.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        if len(response) + 1 > self._max_tokens:
            raise PromptTooLongError(
                f"the demonstration of {prompt.name} has {len(response) + 1} tokens, more than "
                f"sampling.max_tokens = {self._max_tokens}; raise it, or set data.overlong_prompts: skip"
            )
        return ShownResponse(self._prompts.encode(prompt), [*response, self._end])

    def valid_indices(self, prompts: Sequence[Prompt], fitting: Sequence[int]) -> Sequence[int]:
        """Return those of the positions `fitting` whose demonstration fits. Raises ValueError as for prompts."""
        valid = array("q")
        self.skipped = 0
        for position in fitting:
            prompt = prompts[position]
            try:
                # A token stands for at least one byte of text, so most responses need not be encoded.
                if len(prompt.demonstration.encode()) + 1 > self._max_tokens:
                    self.encode(prompt)
                valid.append(position)
            except PromptTooLongError:
                if self._prompts.overlong == "error":
                    raise
                self.skipped += 1
        if not valid:
            raise ValueError(f"all {len(fitting)} demonstrations are longer than {self._max_tokens} tokens; raise it")
        if self.skipped:
            logger.warning("%d of %d demonstrations skipped as too long", self.skipped, len(fitting))
        return valid


def end_token(tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> int:
    """Return the token that ends a demonstration, one of `stops`, which end a response of the model.

    It is the token that ends an assistant's turn in the chat template, or else the tokenizer's EOS, or the lowest of
    all.
    """
    wanted = [*sorted(end_of_turn_ids(tokenizer)), tokenizer.eos_token_id, *sorted(stops)]
    return next(int(token) for token in wanted if token in stops)
