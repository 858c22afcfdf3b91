"""The teachers of a run: their data sets, their engines, and their vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.derived.datasets import train_sets
from megarl.config.schema import Config, RolloutConfig
from megarl.config.schema.algorithm import DistillConfig, TeacherConfig
from megarl.models.hf.model_files import hf_files

SCORED_AT_ONCE = 64  # sequences per engine of a teacher


def teachers_by_set(config: Config) -> dict[str, TeacherConfig]:
    """Return the teacher of each data set that has one, by set name ("" for `data.path`)."""
    known = {each.name: each for each in config.teachers}
    return {each.name: known[each.teacher] for each in train_sets(config) if each.teacher in known}


def distils_in_loss(teachers: Sequence[TeacherConfig], distill: DistillConfig) -> bool:
    """Return whether the loss has a KL term to teachers."""
    return bool(teachers) and distill.where == "loss"


def engine_teachers(teachers: Sequence[TeacherConfig]) -> list[TeacherConfig]:
    """Return the teachers with engines, in the order of the config."""
    return [each for each in teachers if each.where == "engine"]


# Subtracted from a teacher's share of a GPU, so that two engines of the policy never fit on one GPU.
_LESS = 0.001


def sharing_teachers(teachers: Sequence[TeacherConfig]) -> list[TeacherConfig]:
    """Return the teachers whose engines share the GPUs of the policy's engines, in the order of the config."""
    return [each for each in engine_teachers(teachers) if each.gpu_share is not None]


def policy_gpus(rollout: RolloutConfig, teachers: Sequence[TeacherConfig]) -> float:
    """Return the GPUs that Ray gives an engine of the policy; less than 1 if it shares one with a teacher's."""
    share = max((each.gpu_share or 0.0 for each in sharing_teachers(teachers)), default=None)
    return rollout.tensor_parallel if share is None else round(1.0 - share + _LESS, 4)


def teacher_gpus(teacher: TeacherConfig) -> float:
    """Return the GPUs that Ray gives an engine of a teacher; less than 1 if it shares one."""
    return teacher.tensor_parallel if teacher.gpu_share is None else round(teacher.gpu_share - _LESS, 4)


def trainer_teachers(teachers: Sequence[TeacherConfig]) -> list[TeacherConfig]:
    """Return the teachers on the trainer's ranks, in the order of the config."""
    return [each for each in teachers if each.where == "trainer"]


def engine_config(config: Config, teacher: TeacherConfig) -> Config:
    """Return the config of a run whose engines are a teacher's: they load its weights and never change them."""
    rollout = config.rollout.model_copy(
        update={
            "replicas": teacher.replicas,
            "max_replicas": None,
            "tensor_parallel": teacher.tensor_parallel,
            "max_model_len": None,
            "max_num_seqs": SCORED_AT_ONCE,
            "gpu_memory_utilization": teacher.gpu_memory_utilization,
            "engine_kwargs": teacher.engine_kwargs,
            "load_weights": True,
        }
    )
    model = config.model.model_copy(update={"path": teacher.path, "shape": None})
    return config.model_copy(update={"model": model, "rollout": rollout})


def scored_tokens(longest: int) -> int:
    """Return the context of a teacher's engine for samples of `longest` tokens: vLLM generates one more."""
    return longest + 1


def vocabulary_difference(first: Path, second: Path) -> str:
    """Return how the tokens of two models differ; "" if every token has the same id in both.

    Raises ValueError if one has no comparable tokenizer.
    """
    ours, theirs = _vocabulary(first), _vocabulary(second)
    if ours == theirs:
        return ""
    if isinstance(ours, bytes) or isinstance(theirs, bytes):
        return "their tokenizer.model files differ"
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    token = differing[0]
    return f"{len(differing)} tokens, for example {token!r}: id {ours.get(token)} and {theirs.get(token)}"


def _vocabulary(path: Path) -> dict[str, int] | bytes:
    """Return the ids of all tokens by text, or the content of a SentencePiece model."""
    files = hf_files(path)
    if (table := files / "tokenizer.json").is_file():
        content: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
        model = content["model"]["vocab"]
        # A unigram model has a list of (token, score), whose positions are the ids.
        found = dict(model) if isinstance(model, dict) else {token: index for index, (token, _) in enumerate(model)}
        return found | {each["content"]: each["id"] for each in content.get("added_tokens", [])}
    if (model_file := files / "tokenizer.model").is_file():
        return model_file.read_bytes()
    raise ValueError(f"{files} holds no tokenizer.json, by which its vocabulary could be compared with the policy's")
