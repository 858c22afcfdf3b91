"""Demonstrations: prompts with a response from the data file, as the token ids that the model would have produced.

The response is the text of `data.demonstration_field`, encoded separately, and the token that ends an assistant's turn.
It follows the prompt of `PromptEncoder`, including the generation prompt.
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
    """The token ids of a prompt and its response, with the end token."""

    prompt_ids: list[int]
    response_ids: list[int]


class DemonstrationEncoder:
    """Encodes the demonstrations of rows that have one; `prompts` encodes the prompts.

    `max_tokens`: the longest response, including its end; longer ones are treated like overlong prompts. `skipped`:
    how many were left out.
    """

    def __init__(self, prompts: PromptEncoder, end: int, max_tokens: int) -> None:
        self._prompts, self._end, self._max_tokens = prompts, end, max_tokens
        self.skipped = 0

    def encode(self, prompt: Prompt) -> ShownResponse:
        """Return the demonstration of a row. Raises PromptTooLongError if its prompt or response is too long."""
        response = self._prompts.tokenizer(prompt.demonstration, add_special_tokens=False)["input_ids"]
        if len(response) + 1 > self._max_tokens:
            raise PromptTooLongError(
                f"the demonstration of {prompt.name} has {len(response) + 1} tokens, more than "
                f"sampling.max_tokens = {self._max_tokens}; raise it, or set data.overlong_prompts: skip"
            )
        return ShownResponse(self._prompts.encode(prompt), [*response, self._end])

    def valid_indices(self, prompts: Sequence[Prompt], fitting: Sequence[int]) -> Sequence[int]:
        """Return the positions of `fitting` whose demonstration fits. Raises ValueError as for prompts."""
        valid = array("q")
        self.skipped = 0
        for position in fitting:
            prompt = prompts[position]
            try:
                # A token has at least one byte, so most responses need not be encoded.
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
    """Return the token of `stops` (which end the model's responses) that ends a demonstration.

    Preferably it ends an assistant's turn in the chat template, else it is the tokenizer's EOS, else the lowest.
    """
    wanted = [*sorted(end_of_turn_ids(tokenizer)), tokenizer.eos_token_id, *sorted(stops)]
    return next(int(token) for token in wanted if token in stops)
