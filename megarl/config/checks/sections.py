"""Checks that involve several sections, the model, the files or the machine; they run before any process starts.

Every check yields `key: problem; fix`. torch and Megatron are only imported to try a user's loss.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from megarl.common.errors import ConfigError
from megarl.config.checks import layout
from megarl.config.checks.agent import agent_problems, import_path_problems, sandbox_problems
from megarl.config.checks.engine import (
    delta_net_problems,
    engine_key_problems,
    engine_problems,
    head_size_problems,
    liveness_problems,
    shared_gpus_problems,
)
from megarl.config.checks.secrets import secret_problems
from megarl.config.checks.teachers import teacher_problems
from megarl.config.checks.telemetry import ANY_ADDRESS, monitor_problems, telemetry_problems
from megarl.config.derived.algorithm import algorithm_problems
from megarl.config.derived.datasets import (
    TrainSet,
    all_sets,
    data_problems,
    longest_response,
    longest_training_response,
    reward_functions,
)
from megarl.config.derived.hardware import local_gpus
from megarl.config.derived.logprob_passes import correction_problems
from megarl.config.derived.pools import resolve_pools
from megarl.config.derived.staleness import evaluation_problems, pace_problems
from megarl.config.schema import (
    Config,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    VisionConfig,
    WeightSyncConfig,
)
from megarl.config.schema.agent import HARNESS, SHIPPED_LOOPS
from megarl.config.schema.data import CurriculumConfig, EvaluationConfig, RewardConfig
from megarl.config.schema.job import CheckpointConfig, GatewayConfig, LaunchConfig, TimeoutsConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.model_files import hf_files, megatron_step
from megarl.models.hf.read_config import load_info
from megarl.rewards.registry import SHIPPED

PARQUET_SUFFIXES = (".parquet", ".pq")

DeviceType = Literal["cuda", "cpu"]


def detect_device() -> DeviceType:
    """Return the device of a run on this machine: cuda if there are a GPU and a torch built for it."""
    try:
        built_for_cpu = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        built_for_cpu = False
    return "cuda" if local_gpus() and not built_for_cpu else "cpu"


def check(config: Config, *, device: DeviceType | None = None, files: bool = True) -> ModelInfo:
    """Check the whole config; return the model's architecture from config.json.

    Raises ConfigError listing every problem. `device`: of the run (default: this machine's). `files=False` skips files
    that exist only where the run will be (data, weights, tokenizer), to plan on another machine.
    """
    device = device or detect_device()
    problems = list(data_problems(config))
    if config.data.path is None and not config.data.sets:
        raise ConfigError(problems)  # the other checks read the sets
    of_config = (
        _sizes(config),
        pace_problems(config),
        evaluation_problems(config.evaluation, config.checkpoint, config.run),
        _deadlines(config.rollout, config.timeouts),
        liveness_problems(config.admission, config.algorithm),
        correction_problems(config),
        monitor_problems(config.monitor, config.admission),
        _checkpoint(config.checkpoint, config.evaluation),
        _functions(reward_functions(config), config.data.curriculum),
        _gateway(config.gateway, config.run),
        algorithm_problems(config.algorithm),
        agent_problems(config),
        sandbox_problems(config, here=files),
        layout.megatron_problems(config.trainer, config.megatron, device),
        engine_problems(config.rollout),
        _weight_sync(config.weight_sync, device),
        launch_problems(config.launch, config.timeouts),
        secret_problems(config, here=files),
        telemetry_problems(config.telemetry, config.launch, here=files),
        _pools(config),
        shared_gpus_problems(config, device),
        layout.layout_problems(config.trainer),
    )
    problems += itertools.chain.from_iterable(of_config)
    if files:
        problems += list(_files(config))
    planned = not files and planned_elsewhere(config.model)
    key, source = ("shape", config.model.shape) if planned else ("path", config.model.path)
    try:
        info = load_info(source or config.model.path)
    except ValueError as error:
        if not files or config.model.path.is_dir():  # `_files` reports a missing one
            problems.append(f"model.{key}: {error}{_started_elsewhere(source)}")
        raise ConfigError(list(dict.fromkeys(problems))) from None
    of_model = (
        _shape(config.model, info),
        head_size_problems(info, device),
        engine_key_problems(info),
        delta_net_problems(info, recompute_kv=config.weight_sync.recompute_kv),
        layout.model_problems(config.trainer, config.megatron, config.rollout, info),
        layout.router_replay_problems(config, info),
        _lengths(config, info),
        _vision(config, info),
        _patches(config.trainer, config.model.vision, info),
        teacher_problems(config, info, max_sequence_tokens(config, info), files=files),
    )
    problems += itertools.chain.from_iterable(of_model)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return info


def planned_elsewhere(model: ModelConfig) -> bool:
    """Return whether the model is not on this machine, and `model.shape` describes it for a plan."""
    return model.shape is not None and not model.path.exists()


def absent_files(config: Config) -> list[tuple[str, Path]]:
    """Return key and path of the model, the reference and the data files that are not on this machine."""
    paths = [("model.path", config.model.path)]
    if config.needs_reference and config.reference.path is not None:
        paths.append(("reference.path", config.reference.path))
    paths += [(f"{each.key}.path", each.path) for each in all_sets(config)]
    return [(key, path) for key, path in paths if not path.exists()]


def serving_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a config whose pool only serves; trainer and data are ignored."""
    yield from engine_problems(config.rollout)
    yield from _gateway(config.gateway, config.run)
    yield from secret_problems(config, here=True)
    yield from _pools(config)


def _pools(config: Config) -> Iterator[str]:
    try:
        resolve_pools(config)
    except ConfigError as error:
        yield from error.problems


def max_sequence_tokens(config: Config, info: ModelInfo) -> int:
    """Return the upper bound of prompt + response tokens of any sample in training and evaluation."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    if config.data.max_prompt_tokens is None:
        return info.max_positions
    return min(
        info.max_positions,
        config.data.max_prompt_tokens + longest_response(config.data, config.sampling, config.evaluation).tokens,
    )


@dataclass(frozen=True)
class PromptLimit:
    """The longest allowed prompt in tokens, the setting that bounds it, and the fix for a longer one."""

    tokens: int
    setting: str
    fix: str


def prompt_limit(config: Config, info: ModelInfo, max_tokens: int | None = None) -> PromptLimit:
    """Return the limit of training prompts whose responses have at most `max_tokens` (default: the longest of all).

    A prompt and a longest response together must fit the engine and one micro-batch.
    """
    skip = ", or set data.overlong_prompts: skip"
    if config.data.max_prompt_tokens is not None:
        return PromptLimit(config.data.max_prompt_tokens, "data.max_prompt_tokens", f"raise it{skip}")
    held_out = evaluation_prompt_limit(config, info)
    engine = replace(held_out, fix=held_out.fix.rpartition(", or")[0] + skip)
    if config.trainer.micro_batch_tokens == "auto":  # room for any sample
        return engine
    longest = longest_training_response(config.data, config.sampling)
    trained = config.trainer.token_limit - (max_tokens or longest.tokens)
    if trained < engine.tokens:
        # A set has its own limit or the section's.
        setting = longest.setting if max_tokens in (None, longest.tokens) else "sampling.max_tokens of the set"
        return PromptLimit(
            trained, f"trainer.micro_batch_tokens - {setting}", f"raise trainer.micro_batch_tokens{skip}"
        )
    return engine


def evaluation_prompt_limit(config: Config, info: ModelInfo) -> PromptLimit:
    """Return the limit of held-out prompts: with a longest response they must fit the engine, but no micro-batch."""
    longest = longest_response(config.data, config.sampling, config.evaluation)
    tokens, lower = max_sequence_tokens(config, info) - longest.tokens, f"lower {longest.setting}, or leave the row out"
    if config.rollout.max_model_len is not None:
        return PromptLimit(tokens, "rollout.max_model_len - the longest response", f"raise the first, {lower}")
    if config.data.max_prompt_tokens is not None:
        return PromptLimit(tokens, "data.max_prompt_tokens", "raise it, or leave the row out")
    return PromptLimit(tokens, "the model's positions - the longest response", lower)


def _sizes(config: Config) -> Iterator[str]:
    batch, trainer = config.batch, config.trainer
    if trainer.mini_batches > batch.groups:
        yield (
            f"trainer.mini_batches: {trainer.mini_batches} updates from {batch.groups} groups; a group is never "
            f"split, so use at most batch.groups={batch.groups}"
        )
    if trainer.optimizer.min_lr > trainer.optimizer.lr:
        yield f"trainer.optimizer.min_lr: above lr={trainer.optimizer.lr}; lower it"
    if trainer.optimizer.warmup_steps >= (updates := config.run.steps * trainer.mini_batches):
        yield (
            f"trainer.optimizer.warmup_steps: {trainer.optimizer.warmup_steps} must be below the {updates} updates of "
            "the run (run.steps * trainer.mini_batches); lower it"
        )
    for index, beta in enumerate(trainer.optimizer.betas):
        if not 0 <= beta < 1:
            yield f"trainer.optimizer.betas.{index}: must be in [0, 1), not {beta}"
    buffer = config.algorithm.overlong.buffer_tokens
    if buffer > config.sampling.max_tokens:
        yield (
            f"algorithm.overlong.buffer_tokens: {buffer} is more than sampling.max_tokens="
            f"{config.sampling.max_tokens}; the penalised range has to end at that limit, so lower it"
        )
    if config.sampling.stop_token_ids is not None and not config.sampling.stop_token_ids:
        yield "sampling.stop_token_ids: empty, so no response would ever stop; list ids or remove the key"


def _vision(config: Config, info: ModelInfo) -> Iterator[str]:
    if not config.data.images_field:
        return
    if info.vision is None:
        yield f"data.images_field: {info.family} has no vision tower and cannot see the images; remove the key"
    if config.agent.loop == HARNESS:
        yield "data.images_field: harnesses get no images of the data; use another agent.loop, or remove the key"
    for number, teacher in enumerate(config.teachers):
        if teacher.where == "engine":
            yield f"teachers.{number}.where: engines of teachers are shown no images; set it to trainer"
    for each in all_sets(config):
        if isinstance(each, TrainSet) and each.demonstrates:
            yield f"{each.key}.demonstration_field: demonstrations have no images; remove data.images_field"


def _deadlines(rollout: RolloutConfig, timeouts: TimeoutsConfig) -> Iterator[str]:
    deadline, bound = rollout.group_deadline_s, timeouts.generate_s
    if deadline is not None and rollout.on_group_deadline == "finish":
        yield (
            f"rollout.group_deadline_s: {deadline:g} s would never apply, because on_group_deadline: finish has no "
            f"deadline; remove it, or set on_group_deadline to cut or fail"
        )
    if deadline is not None and deadline >= bound:
        yield (
            f"rollout.group_deadline_s: {deadline:g} s would never come, because a response that needs "
            f"timeouts.generate_s={bound:g} s is ended then; lower the first or raise the second"
        )


def _gateway(gateway: GatewayConfig, run: RunConfig) -> Iterator[str]:
    if gateway.host in ANY_ADDRESS:
        yield f"gateway.host: {gateway.host!r} means all addresses; name one address of the gateway's node"
    if gateway.enabled and run.deterministic:
        yield (
            "gateway.enabled: requests from outside change what an engine computes together, so the run could not be "
            "repeated bit for bit; set run.deterministic: false"
        )


def _checkpoint(settings: CheckpointConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    if settings.keep_best is not None:
        sets = [each.name for each in evaluation.sets]
        if not any(settings.keep_best.startswith(f"eval/{name}/") for name in sets):
            known = ", ".join(f"eval/{name}/greedy" for name in sets) or "none: evaluation.sets is empty"
            yield f"checkpoint.keep_best: {settings.keep_best!r} is no metric of an evaluation set; try {known}"
        elif not evaluation.every:
            yield "checkpoint.keep_best: needs evaluations during the run; set evaluation.every"
    if settings.resume not in ("auto", "never") and not Path(settings.resume).is_dir():
        yield f"checkpoint.resume: no such directory: {settings.resume}; use auto, never or the path of a checkpoint"


def _functions(rewards: Mapping[str, RewardConfig], curriculum: CurriculumConfig) -> Iterator[str]:
    """Yield the problems of the import paths of the user's functions."""
    for key, reward in rewards.items():
        if reward.function not in SHIPPED:
            yield from import_path_problems(f"{key}.function", reward.function, f"neither {', '.join(SHIPPED)} nor")
    if (function := curriculum.function) is not None:
        yield from import_path_problems("data.curriculum.function", function, "not")


def _weight_sync(sync: WeightSyncConfig, device: DeviceType) -> Iterator[str]:
    if sync.transport == "nccl" and device == "cpu":
        yield "weight_sync.transport: nccl needs GPUs, and this run would have none; use auto or gloo"


def launch_problems(launch: LaunchConfig, timeouts: TimeoutsConfig) -> Iterator[str]:
    """Yield the problems of the section `launch`."""
    stop, save = launch.stop_before_s, timeouts.save_s
    if stop is not None and stop <= save:
        yield (
            f"launch.stop_before_s: {stop} s to end a step and save, but a save alone may take {save:.0f} s "
            "(timeouts.save_s); raise the first or lower the second"
        )


def _files(config: Config) -> Iterator[str]:
    here = f"(current directory: {os.getcwd()})"
    for key, path in [(f"{each.key}.path", each.path) for each in all_sets(config)]:
        if not path.is_file():
            yield f"{key}: no such file: {path} {here}; relative paths start at the current directory"
        elif path.suffix not in (".jsonl", ".json", *PARQUET_SUFFIXES):
            yield f"{key}: {path} is neither .jsonl nor .parquet; convert or rename it"
    models = [("model.path", config.model.path, config.model.load_weights)]
    if config.needs_reference and config.reference.path is not None:
        models.append(("reference.path", config.reference.path, True))
    for key, path, weights in models:
        if not path.is_dir():
            hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
            command = f"; get a model of the hub by `hf download {path} --local-dir models/{path.name}`" if hub else ""
            yield (
                f"{key}: no such directory: {path} {here}; it must be a Hugging Face directory or a Megatron checkpoint"
                f"{command}"
            )
            continue
        try:
            step, files = megatron_step(path), hf_files(path)
        except ValueError as error:
            yield f"{key}: {error}"
            continue
        if weights and step is None and not any(path.glob("*.safetensors")):
            yield f"{key}: {path} holds no *.safetensors; convert the checkpoint, or set model.load_weights=false"
        if key == "model.path" and not any(all((files / n).is_file() for n in names) for names in _TOKENIZERS):
            yield f"{key}: {_no_tokenizer(files)}"


_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))  # each is sufficient


def _no_tokenizer(files: Path) -> str:
    """Return why a model's directory has no usable tokenizer, with the fix."""
    settings = files / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in settings.read_text(encoding="utf-8", errors="replace"):
        return (
            f"the tokenizer of {files} is Python code of the model (auto_map), which is never run; load it once where "
            "you trust that code, convert it to a fast tokenizer and save it, which writes tokenizer.json"
        )
    return f"{files} holds no tokenizer.json; copy the tokenizer files of the model into it"


def _started_elsewhere(path: Path | None) -> str:
    """Return where a missing relative path was looked for; "" for any other."""
    if path is None or path.is_absolute() or path.exists():
        return ""
    return (
        f" (current directory: {os.getcwd()}; relative paths start there, those of the shipped recipes in the checkout)"
    )


def _shape(model: ModelConfig, info: ModelInfo) -> Iterator[str]:
    """Yield a problem if `model.shape` describes another model than `model.path`: the plan would be wrong."""
    if model.shape is None:
        return
    try:
        shape = load_info(model.shape)
    except ValueError as error:
        yield f"model.shape: {error}{_started_elsewhere(model.shape)}"
        return
    sizes = ("family", "num_layers", "dims", "kv_heads", "max_positions", "tied", "topk")
    if differs := [name for name in sizes if getattr(shape, name) != getattr(info, name)]:
        yield (
            f"model.shape: {model.shape} is of another model than model.path (different: {', '.join(differs)}); "
            "correct it, or set model.shape=null"
        )


def _patches(trainer: TrainerConfig, vision: VisionConfig, info: ModelInfo) -> Iterator[str]:
    most = trainer.micro_batch_patches
    if info.vision is None or most is None:
        return
    needed = vision.images_per_prompt * (vision.max_pixels // info.vision.patch**2)
    if most < needed:
        yield (
            f"trainer.micro_batch_patches: {most} is less than the {needed} patches that the images of one prompt may "
            "have; raise it, or lower model.vision.max_pixels or images_per_prompt"
        )


def _lengths(config: Config, info: ModelInfo) -> Iterator[str]:
    prompt, longest = config.data.max_prompt_tokens, longest_response(config.data, config.sampling, config.evaluation)
    response = longest.tokens
    limit = config.rollout.max_model_len
    if limit is not None and limit > info.max_positions:
        yield (
            f"rollout.max_model_len: {limit} is more than the model's {info.max_positions} positions "
            "(max_position_embeddings in its config.json, the extended length with YaRN); lower it, or raise that"
        )
    if response >= (limit or info.max_positions):
        yield (
            f"{longest.setting}: responses of {response} tokens leave no room for a prompt in "
            f"{'rollout.max_model_len' if limit else 'the model'}'s {limit or info.max_positions}; lower it"
        )
    elif prompt is not None and prompt + response > (limit or info.max_positions):
        yield (
            f"data.max_prompt_tokens: {prompt} + {response} response tokens exceed "
            f"{'rollout.max_model_len' if limit else 'the model'}'s {limit or info.max_positions}; lower one of them"
        )
    if config.trainer.micro_batch_tokens == "auto":  # at least the longest sample
        return
    sample = max_sequence_tokens(config, info)
    configured = prompt is not None or limit is not None
    # Other loops may fill the model's context with several turns.
    bounded = configured or config.agent.loop not in SHIPPED_LOOPS
    if bounded and config.trainer.token_limit < sample:
        others = (
            "" if configured else f", or set rollout.max_model_len, which bounds a trajectory of {config.agent.loop}"
        )
        yield (
            f"trainer.micro_batch_tokens: {config.trainer.micro_batch_tokens} is less than the longest sample "
            f"({sample} tokens); a sample is never split, so raise it to at least {sample}{others}"
        )
    # Without a configured bound the micro-batch limits the prompts, so it needs room for one.
    trained = longest_training_response(config.data, config.sampling)
    if not bounded and config.trainer.token_limit <= trained.tokens:
        yield (
            f"trainer.micro_batch_tokens: {config.trainer.micro_batch_tokens} leaves no room for a prompt alongside "
            f"responses of {trained.tokens} tokens ({trained.setting}); raise it"
        )
