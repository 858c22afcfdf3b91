"""Prompts by group id: a group's problem, its token ids, its sampling, and the input of its reward function.

With one training set, group g takes draw number g of the set's cursor; with several, the mixture gives the set of group
g and the number of the draw from it. Either way a group that is redrawn after a resume gets the same problem.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.chat.images import PromptImages, read_image
from megarl.chat.tokenize import PromptEncoder, TokenDecoder, load_tokenizer, stop_token_ids
from megarl.common.errors import RolloutError
from megarl.common.values import packed
from megarl.config.checks.sections import PromptLimit, evaluation_prompt_limit, max_sequence_tokens, prompt_limit
from megarl.config.derived.datasets import (
    HeldOutSet,
    TrainSet,
    held_out_sets,
    reward_functions,
    train_sets,
    weight_schedule,
)
from megarl.config.schema import Config
from megarl.config.schema.data import RewardConfig
from megarl.data.curriculum import Curriculum
from megarl.data.dataset import DemonstrationEncoder, Prompt, ShownResponse, end_token, load_prompts
from megarl.data.mixture import Cursor, Mixture, stable_hash
from megarl.models.hf.read_config import load_info
from megarl.queue.images import ImageRef
from megarl.rewards.types import RewardInput, RewardSpec
from megarl.rewards.worker_pool import RewardPool
from megarl.rollout.engine.messages import SamplingSpec
from megarl.rollout.tasks.toolbox import Toolbox, Toolboxes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_pool(
    functions: Mapping[str, RewardConfig], reward: RewardConfig, start_timeout_s: float,
    report: Callable[[str], None], *, shares: int = 1,
) -> RewardPool:  # fmt: skip
    """Return the unstarted reward pool of the controller or an agent worker; `functions`: by key.

    `report`: see `RewardPool`. `shares`: how many processes divide `reward.workers`; each gets at least one.
    """
    return RewardPool(
        [RewardSpec(each.function, each.kwargs, key) for key, each in functions.items()],
        workers=max(1, reward.workers // shares),
        timeout_s=reward.timeout_s,
        on_error=reward.on_error,
        start_timeout_s=start_timeout_s,
        memory_gib=reward.memory_gib,
        max_error_share=reward.max_error_share,
        report=report,
    )


@dataclass(frozen=True)
class PromptTask:
    """A prompt, its token ids, and its set's settings for responses.

    `dataset`: the name of the set, "" if there is only one; `reward`: the index of the reward function in the pool.
    `demonstrations`: one per sample of the group, the first for this prompt; empty if the model answers. `end`: as
    `RewardInput.prompt_end`. `images`: the prompt's, and their places in `ids`.
    """

    prompt: Prompt
    ids: list[int]
    sampling: SamplingSpec
    dataset: str = ""
    reward: int = 0
    demonstrations: tuple[ShownResponse, ...] = ()
    end: str = ""
    images: tuple[ImageRef, ...] = ()

    @property
    def answer(self) -> str:
        """The reference answer of the prompt."""
        return self.prompt.answer

    def images_in(self, token_ids: Sequence[int]) -> tuple[ImageRef, ...]:
        """Return the images of a sequence that begins with the prompt.

        Raises RolloutError if a loop has changed the prompt's tokens: images are known by their places.
        """
        if self.images and list(token_ids[: len(self.ids)]) != self.ids:
            raise RolloutError("a sequence with images must begin with the token ids of their prompt")
        return self.images

    def files(self) -> dict[str, bytes]:
        """Return the files of the prompt's images by hash. Raises OSError if one is gone."""
        sources = zip(self.images, self.prompt.images, strict=True)
        return {image.hash: read_image(source) for image, source in sources}

    def without_files(self) -> PromptTask:
        """Return the same problem for a process that needs no pixels."""
        return replace(self, prompt=replace(self.prompt, images=())) if self.images else self

    @cached_property
    def digest(self) -> str:
        """A digest of the problem: its token ids, its images, its data set and its reference answer."""
        content = packed("q", self.ids) + json.dumps([self.dataset, self.answer]).encode()
        content += b"".join(image.hash.encode() for image in self.images)
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def reward_input(self, response: str, token_ids: list[int], finish_reason: str) -> RewardInput:
        """Return the reward function's input for one response."""
        return RewardInput(
            prompt=self.prompt.text,
            response=response,
            token_ids=token_ids,
            finish_reason=finish_reason,
            answer=self.prompt.answer,
            row=self.prompt.row,
            prompt_end=self.end,
        )


@dataclass
class EvalSet:
    """A held-out set: each problem gets one greedy response and `samples` sampled ones.

    `records`: one JSON object per response.
    """

    name: str
    problems: Sequence[PromptTask]
    greedy: SamplingSpec
    samples: int
    seed: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)


class PromptSource:
    """Holds the training prompts, evaluation sets and tokenizer of a run.

    Raises ValueError for mistakes in data, tokenizer, prompt lengths or curriculum.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model.path)
        self.stop_token_ids = tuple(stop_token_ids(config.model.path, self.tokenizer, config.sampling.stop_token_ids))
        self._rewards = list(reward_functions(config).values())
        info = load_info(config.model.path)
        self._images = PromptImages.of(config.model.path, info, config.model.vision)
        run_dir = config.run_dir if config.gateway.enabled else None
        most = max_sequence_tokens(config, info)
        self._made = Toolboxes(config.agent, self.tokenizer, self.stop_token_ids, most, run_dir, self._images)
        self._evaluation_limit = evaluation_prompt_limit(config, info)
        self._sets = [
            _TrainingPrompts(
                each,
                self.tokenizer,
                prompt_limit(config, info, each.sampling.max_tokens),
                config.run.seed,
                self._toolbox(each),
                self.stop_token_ids,
                self._images,
            )
            for each in train_sets(config)
        ]
        self._samplings = [SamplingSpec.training(each.chosen.sampling, self.stop_token_ids) for each in self._sets]
        self._weights = {each.chosen.name: each.chosen.weight for each in self._sets}
        chosen = config.data.curriculum
        self._curriculum = (
            None if chosen.function is None else Curriculum(chosen.function, chosen.kwargs, self._weights)
        )
        # Load them here, not at the first evaluation: a mistake in a set must not end a running run.
        self.eval_toolboxes: dict[str, Toolbox] = {}  # of held-out sets by name; empty if the run has single turns
        self._held_out = [self._eval_set(each) for each in held_out_sets(config)]
        self.reset()

    def reset(self) -> None:
        """Reset the order of the prompts to the beginning of a new run."""
        self._drawn: dict[int, PromptTask] = {}  # of unfinished groups
        first = self._weights if self._curriculum is None else self._curriculum.first_weights
        self._mixture = Mixture(first, self.config.run.seed)
        if self._curriculum is None:
            self._mixture.follow(0, weight_schedule(self.config))
        else:
            self._curriculum.clear()

    def _toolbox(self, chosen: TrainSet | HeldOutSet) -> Toolbox | None:
        try:
            return self._made.of(chosen)
        except ValueError as error:
            raise ValueError(f"{chosen.key}: {error}") from error

    @property
    def toolboxes(self) -> dict[str, Toolbox]:
        """The toolboxes of the training sets by name; empty if the run has single turns."""
        return {each.chosen.name: each.toolbox for each in self._sets if each.toolbox is not None}

    async def close_tools(self) -> None:
        """End the processes and connections of all tools."""
        await self._made.close()

    @property
    def skipped(self) -> int:
        """The number of prompts left out because they are too long."""
        return sum(each.skipped for each in self._sets)

    def draw(self, group_id: int) -> PromptTask:
        """Return the problem of a group, the same at every call, cached until the group is finished."""
        if group_id in self._drawn:
            return self._drawn[group_id]
        index, draw = self._mixture.at(group_id)
        own = self._sets[index]
        prompt, ids, shown, images = own.drawn(draw, self.config.batch.samples_per_group)
        drawn = self._drawn[group_id] = PromptTask(
            prompt,
            ids,
            self._samplings[index],
            own.chosen.name,
            self._reward(own.chosen.reward),
            shown,
            own.encoder.end_of(ids),
            images,
        )
        return drawn

    def dataset(self, group_id: int) -> str:
        """Return the name of a group's set; "" if there is only one."""
        return self._sets[self._mixture.at(group_id)[0]].chosen.name

    def reference(self, group_id: int) -> str:
        """Return the reference answer of a group's problem."""
        drawn = self._drawn.get(group_id)
        if drawn is not None:
            return drawn.answer
        index, draw = self._mixture.at(group_id)
        own = self._sets[index]
        return "" if own.chosen.demonstrates else own.at(draw).answer

    def _reward(self, chosen: RewardConfig) -> int:
        return self._rewards.index(chosen)

    @cached_property
    def decode_all(self) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        """A thread-safe function that returns the texts of several sequences without special tokens.

        Get it in the thread that encodes, because it copies the tokenizer.
        """
        return TokenDecoder(self.tokenizer).texts

    def eval_sets(self) -> list[EvalSet]:
        """Return the configured held-out sets, tokenized, without records."""
        return [replace(each, records=[]) for each in self._held_out]

    def _eval_set(self, chosen: HeldOutSet) -> EvalSet:
        limit, reward = self._evaluation_limit, self._reward(chosen.reward)
        sampling = SamplingSpec.evaluation(chosen.sampling, chosen.max_tokens, self.stop_token_ids)
        try:
            toolbox = self._toolbox(chosen)
            if toolbox is not None:
                self.eval_toolboxes[chosen.name] = toolbox
            encoder = PromptEncoder(
                self.tokenizer,
                limit.tokens,
                setting=limit.setting,
                fix=limit.fix,
                template_kwargs=chosen.data.chat_template_kwargs,
                tools=toolbox.schemas if toolbox is not None else (),
                images=self._images,
            )
            problems = [
                PromptTask(prompt, ids, sampling, chosen.name, reward, end=encoder.end_of(ids), images=images)
                for prompt in load_prompts(chosen.path, chosen.data, chosen.limit)
                for ids, images in (encoder.encode_images(prompt),)
            ]
        except ValueError as error:
            raise ValueError(f"{chosen.key} ({chosen.name}): {error}") from error
        return EvalSet(
            name=chosen.name,
            problems=problems,
            greedy=SamplingSpec.greedy(chosen.max_tokens, self.stop_token_ids),
            samples=chosen.sampling.samples,
            seed=self.config.run.seed,
        )

    def finish(self, group_id: int, rewards: Sequence[float]) -> None:
        """Record the end of a group, and the rewards of its usable samples for the curriculum."""
        self._drawn.pop(group_id, None)
        if self._curriculum is not None:
            self._curriculum.finish(group_id, self.dataset(group_id), rewards)

    def rewards(self, groups: Iterable[int]) -> dict[int, float | None]:
        """Return the mean rewards of finished groups for the curriculum; {} without one.

        After `finish` with these, another source continues from here.
        """
        return {} if self._curriculum is None else {group: self._curriculum.reward(group) for group in groups}

    async def commit(
        self, groups: Iterable[int], steps: int, next_group: Callable[[], int], first_open: Callable[[], int]
    ) -> None:
        """Record the committed end of `groups`, and let the curriculum choose the weights of later groups.

        `steps`: steps done; `next_group()`: the first group not yet admitted; `first_open()`: the first unsettled one,
        from which on problems may be drawn again. Raises ValueError if the curriculum fails, and RolloutError if it
        takes longer than half of `timeouts.rpc_s`.
        """
        if self._curriculum is None:
            return
        self._curriculum.commit(groups)
        progress = self._curriculum.progress(steps, next_group())
        bound = self.config.timeouts.rpc_s / 2
        try:
            async with asyncio.timeout(bound):
                weights = await asyncio.to_thread(self._curriculum.weights, progress)
        except TimeoutError:
            raise RolloutError(
                f"the commit of step {steps} waited {bound:.0f} s for data.curriculum {self._curriculum.path!r}; make "
                "it faster, or raise timeouts.rpc_s"
            ) from None
        self._mixture.reweight(next_group(), weights)
        self._drawn.clear()  # new weights may change the problems of groups that have not begun
        self._mixture.forget(first_open())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the prompt order; the position in it is the group id."""
        if not self.config.data.sets:
            return self._sets[0].cursor.state_dict()
        state = {
            "sets": {each.chosen.name: each.cursor.state_dict() for each in self._sets},
            "mixture": self._mixture.state_dict(),
        }
        return state if self._curriculum is None else state | {"progress": self._curriculum.state_dict()}

    def load_state_dict(self, state: dict[str, Any], next_group: int, steps: int, unsettled: int = 0) -> None:
        """Go back to a saved state after `steps` steps; `next_group`: the first group not admitted by then.

        `unsettled`: how many admitted groups are still to be trained. Weights changed in the config apply from
        `next_group` on. Raises ValueError if a data set, the seed or the order differs.
        """
        self._drawn.clear()
        if bool(self.config.data.sets) != ("sets" in state):
            saved, own = ("data.sets", "data.path") if "sets" in state else ("data.path", "data.sets")
            raise ValueError(
                f"the saved run has {saved}, but this run has {own}: resume with the data of the saved run"
            )
        if not self.config.data.sets:
            self._sets[0].cursor.load_state_dict(state)
            return
        self._mixture.load_state_dict(state["mixture"])
        for each in self._sets:
            try:
                each.cursor.load_state_dict(state["sets"][each.chosen.name])
            except ValueError as error:
                raise ValueError(f"{each.chosen.key} ({each.chosen.name}): {error}") from None
        if self._curriculum is None:
            self._mixture.follow(next_group, weight_schedule(self.config, steps, next_group, unsettled))
        else:
            self._curriculum.load_state_dict(state.get("progress", {}))


class _TrainingPrompts:
    """A training set: its prompts that are not too long, in its own order."""

    def __init__(
        self,
        chosen: TrainSet,
        tokenizer: PreTrainedTokenizerBase,
        limit: PromptLimit,
        seed: int,
        toolbox: Toolbox | None,
        stops: Sequence[int],
        images: PromptImages | None,
    ) -> None:
        self.chosen, self.toolbox = chosen, toolbox
        try:
            self._prompts = load_prompts(chosen.path, chosen.data)
            self.encoder = PromptEncoder(
                tokenizer,
                limit.tokens,
                chosen.data.overlong_prompts,
                limit.setting,
                limit.fix,
                template_kwargs=chosen.data.chat_template_kwargs,
                tools=toolbox.schemas if toolbox is not None else (),
                images=images,
            )
            self._valid = self.encoder.valid_indices(self._prompts)
            self._shown: DemonstrationEncoder | None = None
            if chosen.demonstrates:
                end = end_token(tokenizer, stops)
                self._shown = DemonstrationEncoder(self.encoder, end, chosen.sampling.max_tokens)
                self._valid = self._shown.valid_indices(self._prompts, self._valid)
        except ValueError as error:
            if not chosen.name:
                raise
            raise ValueError(f"{chosen.key} ({chosen.name}): {error}") from error
        own_seed = stable_hash(f"{seed}/{chosen.name}") if chosen.name else seed
        self.cursor = Cursor(len(self._valid), own_seed, chosen.data.shuffle)

    @property
    def skipped(self) -> int:
        """The number of rows left out because they are too long."""
        return self.encoder.skipped + (0 if self._shown is None else self._shown.skipped)

    def drawn(
        self, draw: int, samples: int
    ) -> tuple[Prompt, list[int], tuple[ShownResponse, ...], tuple[ImageRef, ...]]:
        """Return the prompt of a group, its token ids, the demonstrations of its samples, and the prompt's images.

        A group of demonstrations takes one row per sample.
        """
        if self._shown is None:
            prompt = self.at(draw)
            ids, images = self.encoder.encode_images(prompt)
            return prompt, ids, (), images
        prompts = [self.at(draw * samples + index) for index in range(samples)]
        shown = tuple(map(self._shown.encode, prompts))
        return prompts[0], shown[0].prompt_ids, shown, ()

    def at(self, draw: int) -> Prompt:
        """Return the prompt of a draw, counted from 0."""
        return self._prompts[self._valid[self.cursor.at(draw)[1]]]
