"""The training and held-out sets of a run, each with its own values and those that it inherits from the sections.

A resolved set holds the sections of a run with only this set, so readers of a section need no case for several sets.
The only set of `data.path` has the name "".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarl.config.schema import Config, SamplingConfig
from megarl.config.schema.agent import ToolConfig
from megarl.config.schema.data import DataConfig, EvalSamplingConfig, EvaluationConfig, PromptSetConfig, RewardConfig

_ROW_FIELDS = ("format", "prompt_field", "answer_field", "suffix", "chat_template_kwargs")


@dataclass(frozen=True)
class TrainSet:
    """One training set; `key` is its place in the config, for messages."""

    name: str
    key: str
    weight: float
    path: Path
    data: DataConfig
    reward: RewardConfig
    sampling: SamplingConfig
    tools: tuple[ToolConfig, ...] = ()
    from_step: int = 0
    until_step: int | None = None

    @property
    def demonstrates(self) -> bool:
        """True if its rows have responses to learn (demonstrations)."""
        return bool(self.data.demonstration_field)

    def used_in(self, step: int) -> bool:
        """Return whether groups of a step (from 0) may be drawn from the set."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)

    @property
    def teacher(self) -> str | None:
        """The name of its teacher, or None; demonstrations have none."""
        return None if self.demonstrates else self.data.teacher or None


@dataclass(frozen=True)
class HeldOutSet:
    """One evaluation set; `key` is its place in the config, `limit` the number of problems to use (None: all)."""

    name: str
    key: str
    limit: int | None
    path: Path
    data: DataConfig
    reward: RewardConfig
    sampling: EvalSamplingConfig
    max_tokens: int
    tools: tuple[ToolConfig, ...] = ()


def train_sets(config: Config) -> list[TrainSet]:
    """Return the training sets in the order of the config. Raises ValueError if there is none."""
    data = config.data
    if not data.sets:
        if data.path is None:
            raise ValueError("data: neither path nor sets; give the file of the training prompts in data.path")
        return [TrainSet("", "data", 1.0, data.path, data, config.reward, config.sampling, tuple(config.tools))]
    return [
        TrainSet(
            name=each.name,
            key=f"data.sets.{index}",
            weight=each.weight,
            path=each.path,
            data=_data(data, each),
            reward=_reward(config.reward, each),
            sampling=config.sampling.model_copy(update=_given(each.sampling.model_dump())),
            tools=_tools(config.tools, each),
            from_step=each.from_step,
            until_step=each.until_step,
        )
        for index, each in enumerate(data.sets)
    ]


def held_out_sets(config: Config) -> list[HeldOutSet]:
    """Return the evaluation sets in the order of the config."""
    evaluation = config.evaluation
    return [
        HeldOutSet(
            name=each.name,
            key=f"evaluation.sets.{index}",
            limit=each.limit,
            path=each.path,
            data=_data(config.data, each),
            reward=_reward(config.reward, each),
            sampling=evaluation.sampling.model_copy(update=_given(each.sampling.model_dump())),
            max_tokens=each.max_tokens or evaluation.max_tokens or config.sampling.max_tokens,
            tools=_tools(config.tools, each),
        )
        for index, each in enumerate(evaluation.sets)
    ]


def all_sets(config: Config) -> list[TrainSet | HeldOutSet]:
    """Return the training sets, then the evaluation sets."""
    return [*train_sets(config), *held_out_sets(config)]


def reward_functions(config: Config) -> dict[str, RewardConfig]:
    """Return every reward of the run's sets once, by the config key that names it first."""
    found: dict[str, RewardConfig] = {}
    for each in all_sets(config):
        if each.reward not in found.values():
            found["reward" if each.reward == config.reward else f"{each.key}.reward"] = each.reward
    return found


@dataclass(frozen=True)
class ResponseLimit:
    """The longest allowed response in tokens, and the setting that bounds it."""

    tokens: int
    setting: str


def longest_training_response(data: DataConfig, sampling: SamplingConfig) -> ResponseLimit:
    """Return the upper bound of the response tokens of any training sample."""
    shared = ResponseLimit(sampling.max_tokens, "sampling.max_tokens")
    limits = [
        shared if (own := each.sampling.max_tokens) is None
        else ResponseLimit(own, f"data.sets.{index}.sampling.max_tokens")
        for index, each in enumerate(data.sets)
    ]  # fmt: skip
    return max(limits, key=lambda each: each.tokens, default=shared)


def longest_response(data: DataConfig, sampling: SamplingConfig, evaluation: EvaluationConfig) -> ResponseLimit:
    """Return the upper bound of response tokens in training and evaluation."""
    shared = ResponseLimit(sampling.max_tokens, "sampling.max_tokens")
    if evaluation.max_tokens is not None:
        shared = ResponseLimit(evaluation.max_tokens, "evaluation.max_tokens")
    limits = [longest_training_response(data, sampling)]
    for index, each in enumerate(evaluation.sets):
        own = each.max_tokens
        limits.append(shared if own is None else ResponseLimit(own, f"evaluation.sets.{index}.max_tokens"))
    return max(limits, key=lambda each: each.tokens)


def response_limits(config: Config) -> dict[str, int]:
    """Return the `max_tokens` of each set by name; {} if there is only `data.path`."""
    return {each.name: each.sampling.max_tokens for each in train_sets(config)} if config.data.sets else {}


def weight_schedule(
    config: Config, steps: int = 0, next_group: int = 0, unsettled: int = 0
) -> list[tuple[int, dict[str, float]]]:
    """Return (first group, weights of the sets by name) of each part of the run, in order.

    A set has weight 0 outside its steps. After the first `steps` steps, groups below `next_group` have started, of
    which `unsettled` are still to be trained; their batches may have had another size. Groups before the start of the
    run have negative numbers.
    """
    groups, first = config.batch.groups, next_group - unsettled
    sets = train_sets(config)
    changes = {0, *(each.from_step for each in sets), *(each.until_step for each in sets if each.until_step)}
    return [
        (first + (step - steps) * groups, {each.name: each.weight if each.used_in(step) else 0.0 for each in sets})
        for step in sorted(changes)
        if step < config.run.steps
    ]


def own_temperatures(config: Config) -> dict[str, float]:
    """Return the temperature of each set by name; {} if all have the section's."""
    if not config.data.sets:
        return {}
    found = {each.name: each.sampling.temperature for each in train_sets(config)}
    return found if set(found.values()) != {config.sampling.temperature} else {}


def _data(section: DataConfig, own: PromptSetConfig) -> DataConfig:
    """Return the section `data` of a run of one set. An empty system prompt removes the section's."""
    changes = {name: value for name in _ROW_FIELDS if (value := getattr(own, name)) is not None}
    if own.system_prompt is not None:
        changes["system_prompt"] = own.system_prompt or None
    for name in ("demonstration_field", "teacher"):
        chosen = getattr(own, name, "")  # held-out sets have neither
        if chosen is not None:
            changes[name] = chosen or None
    return section.model_copy(update=changes)


def _reward(section: RewardConfig, own: PromptSetConfig) -> RewardConfig:
    """Return the section `reward` of a run of one set. Arguments are inherited together with their function."""
    changes = _given({"function": own.reward.function, "kwargs": own.reward.kwargs})
    if own.reward.function is not None:
        changes.setdefault("kwargs", {})
    return section.model_copy(update=changes)


def _tools(shared: list[ToolConfig], own: PromptSetConfig) -> tuple[ToolConfig, ...]:
    return tuple(shared if own.tools is None else own.tools)


def _given(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def data_problems(config: Config) -> Iterator[str]:
    """Yield the mistakes in the lists of sets, as `key: problem; fix`."""
    data = config.data
    if data.path is None and not data.sets:
        yield "data.path: required; give a JSONL or Parquet file, or several in data.sets"
    if data.path is not None and data.sets:
        yield "data.path: given together with data.sets; move the file into data.sets, or remove one of the two"
    for key, names in (("data", [s.name for s in data.sets]), ("evaluation", [s.name for s in config.evaluation.sets])):
        for index, name in enumerate(names):
            if "/" in name or not name.strip():
                yield f"{key}.sets.{index}.name: {name!r} must be non-empty and without '/' (it names metrics)"
            if name in names[:index]:
                yield f"{key}.sets.{index}.name: {name!r} is given twice; rename one"
    yield from _schedule_problems(config)
    shown = [each.key for each in train_sets(config) if each.demonstrates] if data.path or data.sets else []
    if shown and not config.algorithm.ce.coef:
        yield (
            f"algorithm.ce.coef: 0, so the demonstrations of {shown[0]} would change nothing; raise it, or remove "
            f"{shown[0]}.demonstration_field"
        )
    if data.curriculum.function is not None and len(data.sets) < 2:
        yield "data.curriculum: changes the weights of several sets; list at least two in data.sets, or remove it"
    yield from _template_problems(data, config.evaluation)
    buffer = config.algorithm.overlong.buffer_tokens
    for index, each in enumerate(data.sets):
        own = each.sampling.max_tokens
        if own is not None and buffer > own:
            yield (
                f"data.sets.{index}.sampling.max_tokens: {own} is less than algorithm.overlong.buffer_tokens={buffer}; "
                "the penalised range ends at the set's limit, so raise the limit or lower the buffer"
            )


def _schedule_problems(config: Config) -> Iterator[str]:
    """Yield the mistakes in the steps of the sets."""
    scheduled = False
    for index, each in enumerate(config.data.sets):
        scheduled = scheduled or each.from_step > 0 or each.until_step is not None
        if each.until_step is not None and each.until_step <= each.from_step:
            yield (
                f"data.sets.{index}.until_step: {each.until_step} is not after from_step={each.from_step}, so the set "
                "would never be used; raise it, or remove the set"
            )
    if not scheduled:
        return
    if config.data.curriculum.function is not None:
        yield (
            "data.curriculum: chooses the weights of the sets, and from_step / until_step do too; remove one of them "
            "(the function gets the number of steps)"
        )
    admission = config.admission
    if admission.refill or admission.max_uses > 1:
        key = "refill" if admission.refill else "max_uses"
        yield (
            f"data.sets: from_step and until_step count {config.batch.groups} groups (batch.groups) for each step, and "
            f"with admission.{key} a step starts more or fewer; use data.curriculum, whose function gets the number of "
            "steps"
        )
    for group, weights in weight_schedule(config):
        if not any(weights.values()):
            yield (
                f"data.sets: no set has prompts for step {group // config.batch.groups}; change from_step or "
                "until_step of one"
            )


# Arguments of `apply_chat_template` itself; all others are variables of the template.
_NO_TEMPLATE_VARIABLES = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip


def _template_problems(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    given = {"data": data.chat_template_kwargs}
    given |= {f"data.sets.{i}": each.chat_template_kwargs or {} for i, each in enumerate(data.sets)}
    given |= {f"evaluation.sets.{i}": each.chat_template_kwargs or {} for i, each in enumerate(evaluation.sets)}
    for key, values in given.items():
        for name in sorted(set(values) & set(_NO_TEMPLATE_VARIABLES)):
            yield f"{key}.chat_template_kwargs.{name}: set by megarl and no variable of a chat template; remove it"
