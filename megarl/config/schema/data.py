"""The config sections of prompts and rewards: training data, reward function, held-out sets.

A set of a list (`data.sets`, `evaluation.sets`) may override many keys of the section; `datasets.py` resolves that.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.common.options import Passed, Section
from megarl.config.schema.agent import ToolConfig

RowFormat = Literal["auto", "gsm8k", "problem_answer", "messages", "verl", "fields"]

# The values with which samplers of vLLM and transformers draw from the whole distribution.
NO_TOP_P, NO_TOP_K, NO_REPETITION_PENALTY = 1.0, -1, 1.0


class SetRewardConfig(Section):
    """The reward function of one set; default: the section `reward`."""

    function: str | None = Field(None, description="As `reward.function`.")
    kwargs: Passed | None = None
    """Arguments bound to the function; default: none if `function` is given, else `reward.kwargs`."""


class SetSamplingConfig(Section):
    """Sampling of the training responses of one set; default: the section `sampling`."""

    temperature: float | None = Field(None, gt=0)
    """Temperature; the trainer divides the logits of these samples by it as well."""
    max_tokens: int | None = Field(None, ge=1, description="Upper bound of response tokens, EOS included.")


class PromptSetConfig(Section):
    """A set of a list: its file, and keys of `data` and `reward` that it has for itself; null: the section's value."""

    name: str = Field(..., description="Name in metrics, tables and checkpoints.")
    path: Path = Field(..., description="JSONL or Parquet file.")
    format: RowFormat | None = Field(None, description="As `data.format`.")
    prompt_field: str | None = Field(None, description="As `data.prompt_field`.")
    answer_field: str | None = Field(None, description="As `data.answer_field`.")
    system_prompt: str | None = Field(None, description="As `data.system_prompt`; empty: no system message.")
    suffix: str | None = Field(None, description="As `data.suffix`.")
    chat_template_kwargs: Passed | None = Field(None, description="As `data.chat_template_kwargs`; not merged.")
    tools: list[ToolConfig] | None = Field(None, description="As `tools`; an empty list: the set has none.")
    reward: SetRewardConfig = Field(SetRewardConfig(), description="The keys of `data.sets[].reward`.")


class TrainSetConfig(PromptSetConfig):
    """One of several training sets. A key that is left out has the value of `data`, `reward` or `sampling`."""

    weight: float = Field(1.0, gt=0, description="Share of the groups, relative to the other sets' weights.")
    from_step: int = Field(0, ge=0, description="The first step whose groups are drawn from the set.")
    until_step: int | None = Field(None, ge=1)
    """The first step that draws no more groups from the set; null: to the end."""
    demonstration_field: str | None = Field(None, description="As `data.demonstration_field`; empty: none.")
    teacher: str | None = Field(None, description="As `data.teacher`; empty: none.")
    sampling: SetSamplingConfig = SetSamplingConfig()


class CurriculumConfig(Section):
    """A function that changes the weights of the sets during a run (docs/training.md#several-data-sets)."""

    function: str | None = Field(None, description="Import path `package.module:function`; null = constant weights.")
    kwargs: Passed = Field(default_factory=dict, description="As `reward.kwargs`, for this function.")


class DataConfig(Section):
    """The training prompts: one file (`path`), or several sets of prompts with weights (`sets`)."""

    path: Path | None = Field(None, description="JSONL or Parquet file; required unless there are `sets`.")
    sets: list[TrainSetConfig] = Field(default_factory=list, description="Several training sets, instead of `path`.")
    format: RowFormat = "auto"
    """auto recognises GSM8K (question/answer with ####), problem/answer, messages/answer and verl's files
    (prompt/reward_model.ground_truth, as DAPO-Math-17k is published)."""
    prompt_field: str = Field("prompt", description="With `fields`: a string, or a list of chat messages.")
    answer_field: str = Field("answer", description="With `fields`: the reference answer.")
    images_field: str | None = None
    """A field with the images of the prompt (docs/training/vision.md): a path relative to the file, Hugging Face's
    {bytes, path}, or a list of these. null: rows with a column `images` are refused if the model has a vision tower."""
    tools_field: str | None = None
    """A field with the row's own tools (a list of OpenAI's schemas, or its JSON text), which its prompt shows to the
    model instead of those of `tools`; with `tools` each must have the name of one of them. null: rows with a column
    `tools` are refused."""
    demonstration_field: str | None = None
    """A field with a response for the model to learn (supervised fine-tuning, by the loss term `ce`). No engine
    generates for such a prompt and nothing is scored (docs/training.md). null: the model generates responses."""
    teacher: str | None = None
    """Name of the teacher in `teachers` that scores the policy's responses."""
    system_prompt: str | None = Field(None, description="Prepended as a system message.")
    suffix: str = Field("", description="Appended to every user message, e.g. an answer-format instruction.")
    chat_template_kwargs: Passed = Field(default_factory=dict)
    """Variables of the tokenizer's chat template, e.g. `{enable_thinking: false}` of Qwen3."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; default: the longest that fits the engine and a micro-batch."""
    overlong_prompts: Literal["error", "skip"] = Field("error", description="Refuse longer prompts or skip them.")
    shuffle: bool = Field(True, description="Draw prompts in a seeded random order that is new in each epoch.")
    curriculum: CurriculumConfig = CurriculumConfig()


class RewardConfig(Section):
    """The reward function, which runs in processes that can be killed."""

    function: str = Field("math", description="`gsm8k`, `math`, `code`, or an import path `package.module:function`.")
    kwargs: Passed = Field(default_factory=dict)
    """Keyword arguments bound to the function; `{env: NAME}` for a secret (docs/configuration.md)."""
    workers: int = Field(1, ge=1)
    """Reward processes; each runs the functions of all sets. Divided among the controller and `rollout.agent_workers`.
    """
    timeout_s: float = Field(10.0, gt=0, description="Seconds per sample, after which its process is killed.")
    memory_gib: float | None = Field(4.0, gt=0)
    """GiB that each reward process may allocate (RLIMIT_DATA) before the function gets a MemoryError; null = no limit.
    """
    on_error: Literal["drop"] | Annotated[float, Field(allow_inf_nan=False)] = "drop"
    """Treatment of a sample whose function hung, raised, crashed or returned no finite number: `drop` counts it as
    failed and does not train on it; a number becomes its reward. In evaluation `drop` counts it as wrong."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """The run ends if a function fails for more than this share of its latest 64 samples, and for at least 16 of them;
    1 = never."""
    trial_call: bool = True
    """Call each function once before anything starts, with the first row of a set and its reference answer as the
    response. false: only import it."""

    @property
    def expects_failures(self) -> bool:
        """True if the config covers samples for which the function fails."""
        return self.on_error != "drop" or self.max_error_share >= 1


class EvalSamplingConfig(Section):
    """Sampling of the `sampled` evaluation; `greedy` is temperature 0."""

    temperature: float = Field(1.0, gt=0, description="Temperature.")
    top_p: float = Field(NO_TOP_P, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(NO_TOP_K, ge=-1, description="Top-k; -1 = off.")
    repetition_penalty: float = Field(NO_REPETITION_PENALTY, gt=0, description="Repetition penalty.")
    samples: int = Field(1, ge=1, description="Responses per prompt; accuracy is their mean.")


class EvalSetSamplingConfig(Section):
    """Sampling of the `sampled` evaluation of one set; default: `evaluation.sampling`."""

    temperature: float | None = Field(None, gt=0, description="Temperature.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, ge=-1, description="Top-k; -1 = off.")
    repetition_penalty: float | None = Field(None, gt=0, description="Repetition penalty.")
    samples: int | None = Field(None, ge=1, description="Responses per prompt: 32 for mean@32.")


class EvalSetConfig(PromptSetConfig):
    """One held-out set. A key that is left out has the value of `data`, `reward` or `evaluation`."""

    limit: int | None = Field(None, ge=1, description="Use only this many problems from the start of the file.")
    max_tokens: int | None = Field(None, ge=1)
    """Upper bound of response tokens; default `evaluation.max_tokens`."""
    sampling: EvalSetSamplingConfig = EvalSetSamplingConfig()


class EvaluationConfig(Section):
    """Held-out evaluation on the rollout pool, greedy and sampled; `summary.json` shows the first set."""

    sets: list[EvalSetConfig] = Field(default_factory=list, description="Held-out sets; empty = no evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 = only before and after.")
    concurrent: bool | None = None
    """Continue training during an evaluation. Its requests give way to training, and its report has the versions of its
    tokens. The run always waits for evaluations before the first step and after the last. Default: true where
    generation runs ahead (`admission.mode`), except with `rollout.share_gpus`, and with `checkpoint.keep_best` or
    `run.deterministic`, which need one version."""
    max_tokens: int | None = Field(None, ge=1)
    """Upper bound of response tokens; default `sampling.max_tokens`."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
