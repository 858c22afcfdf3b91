"""The teachers of a run: which data set has which, the engines that they need, and what must fit before the start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config.checks import layout
from megarl.config.checks.engine import engine_problems
from megarl.config.derived.datasets import TrainSet, train_sets
from megarl.config.schema import Config
from megarl.config.schema.teacher_sections import TeacherConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.model_files import hf_files, megatron_step
from megarl.models.hf.read_config import load_info

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def teachers_by_set(config: Config) -> dict[str, TeacherConfig]:
    """Return the teacher of each data set that has one, by the name of the set ("" for `data.path`)."""
    known = {each.name: each for each in config.teachers}
    return {each.name: known[each.teacher] for each in train_sets(config) if each.teacher in known}


def sets_of(config: Config, teacher: TeacherConfig) -> frozenset[str]:
    """Return the names of the data sets that learn from a teacher."""
    return frozenset(name for name, own in teachers_by_set(config).items() if own == teacher)


def distils_in_loss(config: Config) -> bool:
    """Tell whether the loss has a term of the KL to teachers."""
    return bool(config.teachers) and config.algorithm.distill.where == "loss"


def engine_teachers(config: Config) -> list[TeacherConfig]:
    """Return the teachers that have engines of their own, in the order of the config."""
    return [each for each in config.teachers if each.where == "engine"]


def trainer_teachers(config: Config) -> list[TeacherConfig]:
    """Return the teachers that the trainer's ranks hold, in the order of the config."""
    return [each for each in config.teachers if each.where == "trainer"]


def teacher_engines(config: Config) -> int:
    """Return the number of engines of all teachers."""
    return sum(each.replicas for each in engine_teachers(config))


def teacher_gpus(config: Config) -> int:
    """Return the number of GPUs (on CPU: engine workers) of the teachers' engines."""
    return sum(each.replicas * each.tensor_parallel for each in engine_teachers(config))


def known_models(config: Config) -> dict[str, ModelInfo]:
    """Return the models of the teachers that the trainer's ranks hold, as far as their config.json is here."""
    found = {}
    for each in trainer_teachers(config):
        with suppress(ValueError):
            found[each.name] = load_info(each.path)
    return found


def engine_config(config: Config, teacher: TeacherConfig) -> Config:
    """Return the config of a run whose engines are those of a teacher: they read its weights and never change them."""
    rollout = config.rollout.model_copy(
        update={
            "replicas": teacher.replicas,
            "max_replicas": None,
            "tensor_parallel": teacher.tensor_parallel,
            "max_model_len": None,
            "max_num_seqs": teacher.max_num_seqs,
            "gpu_memory_utilization": teacher.gpu_memory_utilization,
            "engine_kwargs": teacher.engine_kwargs,
            "load_weights": True,
        }
    )
    model = config.model.model_copy(update={"path": teacher.path, "shape": None})
    return config.model_copy(update={"model": model, "rollout": rollout})


def scored_tokens(longest: int) -> int:
    """Return the context of a teacher's engine for samples of `longest` tokens: vLLM generates one token more."""
    return longest + 1


def teacher_problems(config: Config, info: ModelInfo, longest: int, *, files: bool) -> Iterator[str]:
    """Yield the mistakes in the teachers and in their names at the data sets.

    `info`: of the policy; `longest`: the most tokens of a sample. `files`: the teachers' files are on this machine.
    """
    yield from _name_problems(config)
    if distils_in_loss(config) and config.algorithm.kl.coef and config.algorithm.kl.where == "loss":
        yield (
            "algorithm.distill.where: the loss has one term of a KL (ref_kl), and algorithm.kl.coef asks for that to "
            "the reference policy; set algorithm.kl.where=reward, algorithm.kl.coef=0, or "
            "algorithm.distill.where=advantage"
        )
    for index, teacher in enumerate(config.teachers):
        key = f"teachers.{index}"
        if teacher.where == "engine":
            yield from _engine_problems(config, teacher, key)
        if files:
            yield from _model_problems(config, teacher, key, info, longest)


def _name_problems(config: Config) -> Iterator[str]:
    names = [each.name for each in config.teachers]
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            yield f"teachers.{index}.name: {name!r} names a log file: use letters, digits and _ . -"
        if name in names[:index]:
            yield f"teachers.{index}.name: {name!r} is given twice; rename one"
    sets = train_sets(config)
    for each in sets:
        if each.teacher is not None and each.teacher not in names:
            known = ", ".join(names) or "none: the list `teachers` is empty"
            yield f"{each.key}.teacher: there is no teacher {each.teacher!r}; known are {known}"
        elif each.teacher is None and names and not each.demonstrates and not _declined(config, each):
            yield (
                f"{each.key}.teacher: the run has teachers ({', '.join(names)}) and this set names none; name one, or "
                'set it to "" to train the set on its rewards alone'
            )
    for index, name in enumerate(names):
        if all(each.teacher != name for each in sets):
            yield f"teachers.{index}: no data set learns from {name!r}; name it in data.teacher or data.sets[].teacher"


def _declined(config: Config, chosen: TrainSet) -> bool:
    """Tell whether a set says that it has no teacher."""
    own = {each.name: each.teacher for each in config.data.sets}.get(chosen.name)
    return own == "" or (own is None and config.data.teacher == "")


def _engine_problems(config: Config, teacher: TeacherConfig, key: str) -> Iterator[str]:
    for each in train_sets(config):
        if each.teacher == teacher.name and each.sampling.temperature != 1:
            own = "sampling" if each.sampling.temperature == config.sampling.temperature else f"{each.key}.sampling"
            yield (
                f"{own}.temperature: {each.sampling.temperature:g}, but the engines of teacher {teacher.name!r} score "
                "at temperature 1, so the KL would be between different distributions; sample at 1, or set "
                f"{key}.where=trainer"
            )
    for problem in engine_problems(engine_config(config, teacher)):
        yield f"{key}.{problem.removeprefix('rollout.')}"


def _model_problems(config: Config, teacher: TeacherConfig, key: str, info: ModelInfo, longest: int) -> Iterator[str]:
    path = teacher.path
    if not path.is_dir():
        yield f"{key}.path: no such directory: {path}; relative paths start at the current directory"
        return
    try:
        own, step = load_info(path), megatron_step(path)
        differing = vocabulary_difference(config.model.path, path)
    except ValueError as error:
        yield f"{key}.path: {error}"
        return
    if step is not None and teacher.where == "engine":
        yield f"{key}.path: {path} is a Megatron checkpoint, which vLLM cannot read; convert it, or set where=trainer"
    elif step is None and not any(path.glob("*.safetensors")):
        yield f"{key}.path: {path} holds no *.safetensors; convert the checkpoint"
    if differing:
        yield (
            f"{key}.path: its vocabulary differs from that of model.path ({differing}), so its log-probs would be of "
            "other tokens; use a teacher with the policy's tokenizer"
        )
    if own.vocab_size < info.vocab_size:
        yield (
            f"{key}.path: it has {own.vocab_size} rows of the vocabulary, and the policy can sample {info.vocab_size} "
            "tokens; use a teacher that scores all of them"
        )
    needed = scored_tokens(longest) if teacher.where == "engine" else longest
    if own.max_positions < needed:
        yield (
            f"{key}.path: it has {own.max_positions} positions, and samples need {needed}; set data.max_prompt_tokens, "
            "or lower sampling.max_tokens"
        )
    for problem in layout.model_problems(engine_config(config, teacher), own):
        concerned = "rollout." if teacher.where == "engine" else "trainer."
        if problem.startswith(concerned):
            name = "tensor_parallel" if teacher.where == "engine" else "where"
            yield f"{key}.{name}: {problem.partition(': ')[2]} ({problem.partition(':')[0]})"


def vocabulary_difference(first: Path, second: Path) -> str:
    """Return how the tokens of two models differ; "" if every token has the same id in both.

    Raises ValueError if one has no tokenizer that can be compared.
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
    """Return the ids of all tokens by their text, or the content of a SentencePiece model."""
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
