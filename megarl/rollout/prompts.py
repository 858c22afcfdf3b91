"""Prompts by group id: the problem of a group, its token ids, and the input of its reward function.

Group g takes draw number g of the cursor, so a group that is redrawn after a resume gets the same problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config.checks import evaluation_prompt_limit, prompt_limit
from megarl.config.schema import Config, EvalSetConfig
from megarl.data.cursor import Cursor
from megarl.data.dataset import Prompt, load_prompts
from megarl.data.tokenize import PromptEncoder, load_tokenizer, stop_token_ids
from megarl.models.read_config import load_info
from megarl.rewards.types import RewardInput
from megarl.rollout.evaluate_on_fleet import EvalProblem, EvalSet
from megarl.rollout.requests import SamplingSpec


@dataclass(frozen=True)
class Drawn:
    """A prompt and its token ids."""

    prompt: Prompt
    ids: list[int]

    @property
    def answer(self) -> str:
        return self.prompt.answer

    def reward_input(self, response: str, token_ids: list[int], finish_reason: str) -> RewardInput:
        """Return the reward function's input for one response."""
        return RewardInput(
            prompt=self.prompt.text,
            response=response,
            token_ids=token_ids,
            finish_reason=finish_reason,
            answer=self.prompt.answer,
            row=self.prompt.row,
        )


class PromptSource:
    """Holds the training prompts, evaluation sets and tokenizer of a run.

    Raises ValueError for mistakes in data, tokenizer or prompt lengths.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_token_ids = tuple(stop_token_ids(config.model.path, self.tokenizer, config.sampling.stop_token_ids))
        info = load_info(config.model.path)
        limit, self._evaluation_limit = prompt_limit(config, info), evaluation_prompt_limit(config, info)
        self._prompts = load_prompts(config.data.path, config.data)
        self._encoder = PromptEncoder(self.tokenizer, limit.tokens, config.data.overlong_prompts, limit.setting)
        self._valid = self._encoder.valid_indices(self._prompts)
        self._cursor = Cursor(len(self._valid), config.run.seed, config.data.shuffle)

    @property
    def skipped(self) -> int:
        """The number of prompts that are left out because they are too long."""
        return self._encoder.skipped

    def draw(self, group_id: int) -> Drawn:
        """Return the problem of a group, the same one at every call."""
        _, index = self._cursor.at(group_id)
        prompt = self._prompts[self._valid[index]]
        return Drawn(prompt, self._encoder.encode(prompt))

    def reference(self, group_id: int) -> str:
        """Return the reference answer of a group's problem."""
        return self._prompts[self._valid[self._cursor.at(group_id)[1]]].answer

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens, as reward functions get it."""
        # transformers checks every element of a list one by one, which takes longer than decoding them.
        text: str = self.tokenizer.decode(np.asarray(ids, dtype=np.int64), skip_special_tokens=True)
        return text

    def eval_sets(self) -> list[EvalSet]:
        """Return the configured held-out sets, tokenized. Raises ValueError for a prompt that is too long."""
        return [self._eval_set(each) for each in self.config.evaluation.sets]

    def _eval_set(self, chosen: EvalSetConfig) -> EvalSet:
        config = self.config
        limit = self._evaluation_limit
        encoder = PromptEncoder(self.tokenizer, limit.tokens, setting=limit.setting)
        problems = []
        for prompt in load_prompts(chosen.path, config.data, chosen.limit):
            drawn = Drawn(prompt, encoder.encode(prompt))
            problems.append(EvalProblem(drawn.ids, drawn.reward_input, prompt.answer))
        max_tokens = config.evaluation.max_tokens or config.sampling.max_tokens
        return EvalSet(
            name=chosen.name,
            problems=problems,
            greedy=SamplingSpec.greedy(max_tokens, self.stop_token_ids),
            sampled=SamplingSpec.evaluation(config.evaluation.sampling, max_tokens, self.stop_token_ids),
            samples=config.evaluation.sampling.samples,
            seed=config.run.seed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the prompts depends on; the position in it is the group id."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a saved state. Raises ValueError if the data set, seed or order is a different one."""
        self._cursor.load_state_dict(state)
