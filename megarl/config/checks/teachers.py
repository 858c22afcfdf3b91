"""Checks of teachers: their names, engines and models."""

import re
from collections.abc import Iterator, Sequence

from megarl.config.checks import layout
from megarl.config.checks.engine import engine_problems
from megarl.config.derived.datasets import TrainSet, train_sets
from megarl.config.derived.teachers import (
    distils_in_loss,
    engine_config,
    scored_tokens,
    sharing_teachers,
    vocabulary_difference,
)
from megarl.config.schema import Config, RolloutConfig
from megarl.config.schema.algorithm import TeacherConfig
from megarl.config.schema.data import DataConfig
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.hf.model_files import megatron_step, not_for_engines
from megarl.models.hf.read_config import load_info

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def teacher_problems(config: Config, info: ModelInfo, longest: int, *, files: bool) -> Iterator[str]:
    """Yield the problems of the teachers and of the data sets that name them.

    `info`: of the policy; `longest`: the most tokens of a sample. `files`: the teachers' files are on this machine.
    """
    yield from _name_problems([each.name for each in config.teachers], train_sets(config), config.data)
    algorithm = config.algorithm
    if distils_in_loss(config.teachers, algorithm.distill) and algorithm.kl.coef and algorithm.kl.where == "loss":
        yield (
            "algorithm.distill.where: the loss has one KL term (ref_kl), and algorithm.kl.coef uses it for the "
            "reference; set algorithm.kl.where=reward, algorithm.kl.coef=0, or algorithm.distill.where=advantage"
        )
    yield from _share_problems(config.rollout, config.teachers)
    for index, teacher in enumerate(config.teachers):
        key = f"teachers.{index}"
        if teacher.where == "engine":
            yield from _engine_problems(config, teacher, key)
        if files:
            yield from _model_problems(config, teacher, key, info, longest)


def _name_problems(names: list[str], sets: list[TrainSet], data: DataConfig) -> Iterator[str]:
    for index, name in enumerate(names):
        if not _NAME.fullmatch(name):
            yield f"teachers.{index}.name: {name!r} names a log file: use letters, digits and _ . -"
        if name in names[:index]:
            yield f"teachers.{index}.name: {name!r} is given twice; rename one"
    for each in sets:
        if each.teacher is not None and each.teacher not in names:
            known = ", ".join(names) or "none: the list `teachers` is empty"
            yield f"{each.key}.teacher: there is no teacher {each.teacher!r}; known are {known}"
        elif each.teacher is None and names and not each.demonstrates and not _declined(data, each):
            yield (
                f"{each.key}.teacher: the run has teachers ({', '.join(names)}) and this set names none; name one, or "
                'set it to "" to train the set on its rewards alone'
            )
    for index, name in enumerate(names):
        if all(each.teacher != name for each in sets):
            yield f"teachers.{index}: no data set learns from {name!r}; name it in data.teacher or data.sets[].teacher"


def _declined(data: DataConfig, chosen: TrainSet) -> bool:
    """Return whether a set explicitly has no teacher."""
    own = {each.name: each.teacher for each in data.sets}.get(chosen.name)
    return own == "" or (own is None and data.teacher == "")


def _engine_problems(config: Config, teacher: TeacherConfig, key: str) -> Iterator[str]:
    for each in train_sets(config):
        if each.teacher == teacher.name and each.sampling.temperature != 1:
            own = "sampling" if each.sampling.temperature == config.sampling.temperature else f"{each.key}.sampling"
            yield (
                f"{own}.temperature: {each.sampling.temperature:g}, but the engines of teacher {teacher.name!r} score "
                "at temperature 1, so the KL would be between different distributions; sample at 1, or set "
                f"{key}.where=trainer"
            )
    for problem in engine_problems(engine_config(config, teacher).rollout):
        yield f"{key}.{problem.removeprefix('rollout.')}"


def _share_problems(rollout: RolloutConfig, teachers: Sequence[TeacherConfig]) -> Iterator[str]:
    """Yield why teachers' engines cannot share the GPUs of the policy's engines."""
    sharing = sharing_teachers(teachers)
    if not sharing:
        return
    keys = {each.name: f"teachers.{index}" for index, each in enumerate(teachers)}
    first = keys[sharing[0].name]
    wide = {"rollout": rollout.tensor_parallel} | {keys[each.name]: each.tensor_parallel for each in sharing}
    if spread := [f"{key}.tensor_parallel" for key, gpus in wide.items() if gpus > 1]:
        yield f"{first}.gpu_share: only engines of one GPU share it; set {' and '.join(spread)} to 1, or remove the key"
    if others := [each for each in sharing if each.gpu_share != sharing[0].gpu_share]:
        yield (
            f"{keys[others[0].name]}.gpu_share: {others[0].gpu_share}, and {first}.gpu_share is "
            f"{sharing[0].gpu_share}, so that two engines of teachers could be on one GPU; make them equal"
        )
    engines = sum(each.replicas for each in sharing)
    if engines != rollout.replicas or rollout.max_replicas not in (None, rollout.replicas):
        yield (
            f"{first}.gpu_share: {engines} engines of teachers are on the GPUs of {rollout.replicas} of the policy "
            "(rollout.replicas); make teachers.*.replicas and rollout.replicas agree, and remove rollout.max_replicas"
        )
    for each in sharing:
        own, policys = each.gpu_memory_utilization, rollout.gpu_memory_utilization
        if own + policys > 1:
            yield (
                f"{keys[each.name]}.gpu_memory_utilization: {own:g}, and rollout.gpu_memory_utilization is {policys:g} "
                f"of the same GPU: together {own + policys:g} of its memory; lower them to less than 1 together"
            )


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
    if (reason := not_for_engines(path)) and teacher.where == "engine":
        yield f"{key}.path: {path} {reason}, which vLLM cannot read; convert it, or set where=trainer"
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
    if _pixels(own) != _pixels(info):
        yield f"{key}.path: teacher and policy must take the same patches of images, or both none; use another teacher"
    needed = scored_tokens(longest) if teacher.where == "engine" else longest
    if own.max_positions < needed:
        yield (
            f"{key}.path: it has {own.max_positions} positions, and samples need {needed}; set data.max_prompt_tokens, "
            "or lower sampling.max_tokens"
        )
    rollout = engine_config(config, teacher).rollout
    for problem in layout.model_problems(config.trainer, config.megatron, rollout, own):
        concerned = "rollout." if teacher.where == "engine" else "trainer."
        if problem.startswith(concerned):
            name = "tensor_parallel" if teacher.where == "engine" else "where"
            yield f"{key}.{name}: {problem.partition(': ')[2]} ({problem.partition(':')[0]})"


def _pixels(info: ModelInfo) -> tuple[int, ...]:
    """Return the sizes that determine image patches; () for a text model."""
    tower = info.vision
    return () if tower is None else (tower.patch, tower.frames, tower.merge, tower.channels)
