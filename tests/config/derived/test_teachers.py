"""Teachers in the config: every mistake is reported before a start, and their engines and weights are in the plan."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.common.values import GIB
from megarl.config.checks.sections import check
from megarl.config.derived.logprob_passes import TeacherPass, teacher_passes
from megarl.config.derived.pools import engines_per_node, resolve_pools
from megarl.config.derived.teachers import (
    engine_config,
    policy_gpus,
    teacher_gpus,
    teachers_by_set,
    vocabulary_difference,
)
from megarl.config.memory_plan.plan import make_plan
from megarl.config.schema import ReferenceConfig
from tests.support.checkpoints.converter import convert
from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import config

TEACHER = {"name": "big", "where": "engine"}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("student") / "model")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers and wider than the student, the same vocabulary."""
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=5, num_hidden_layers=8)


def sets(data: Path, *names: str | None) -> dict[str, Any]:
    """A list of sets with these teachers; None: the key is left out."""
    return {
        "path": None,
        "max_prompt_tokens": 32,
        "sets": [
            {"name": f"set{index}", "path": str(data)} | ({} if name is None else {"teacher": name})
            for index, name in enumerate(names)
        ],
    }


def problems(student: Path, path: Path, teachers: list[dict[str, Any]], **changes: Any) -> list[str]:
    try:
        check(config(student, path, teachers=teachers, **changes), device="cpu")
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("where", ["engine", "trainer"])
def test_one_teacher_for_all_sets_and_one_for_each(student: Path, teacher: Path, data: Path, where: str) -> None:
    one = [{**TEACHER, "path": teacher, "where": where}]
    assert problems(student, data, one, data__teacher="big") == []
    two = [*one, {**TEACHER, "name": "self", "path": student, "where": where}]
    assert problems(student, data, two, data=sets(data, "big", "self", "", "self")) == []
    made = config(student, data, teachers=two, data=sets(data, "big", "self", "", "self"))
    assert {name: each.name for name, each in teachers_by_set(made).items()} == {
        "set0": "big", "set1": "self", "set3": "self"
    }  # fmt: skip
    passes = [TeacherPass("big", frozenset({"set0"})), TeacherPass("self", frozenset({"set1", "set3"}))]
    assert teacher_passes(made) == (passes if where == "trainer" else [])


def test_demonstrations_have_no_teacher(student: Path, teacher: Path, tmp_path: Path) -> None:
    file = tmp_path / "sft.jsonl"
    file.write_text(json.dumps({"problem": "1+1=?", "solution": "2", "answer": "2"}) + "\n")
    both = sets(file, None, None) | {"teacher": "big"}
    both["sets"][0]["demonstration_field"] = "solution"
    teachers = [{**TEACHER, "path": teacher}]
    assert problems(student, file, teachers, data=both) == []
    assert list(teachers_by_set(config(student, file, teachers=teachers, data=both))) == ["set1"]


def test_names_are_checked(student: Path, teacher: Path, data: Path) -> None:
    own = {**TEACHER, "path": teacher}
    assert problems(student, data, [own], data__teacher="huge") == [
        "data.teacher: there is no teacher 'huge'; known are big",
        "teachers.0: no data set learns from 'big'; name it in data.teacher or data.sets[].teacher",
    ]
    assert problems(student, data, [], data__teacher="huge") == [
        "data.teacher: there is no teacher 'huge'; known are none: the list `teachers` is empty"
    ]
    found = problems(student, data, [own], data=sets(data, "big", None))
    assert len(found) == 1 and found[0].startswith("data.sets.1.teacher: the run has teachers (big) and this set names")
    assert problems(student, data, [own], data=sets(data, "big", "")) == []
    twice = problems(student, data, [own, own], data__teacher="big")
    assert "teachers.1.name: 'big' is given twice; rename one" in twice
    odd = problems(student, data, [{**own, "name": "a/b"}], data__teacher="a/b")
    assert odd == ["teachers.0.name: 'a/b' names a log file: use letters, digits and _ . -"]


def test_the_vocabulary_must_be_the_same(student: Path, teacher: Path, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    table = json.loads((other / "tokenizer.json").read_text())
    first, second, *_ = sorted(table["model"]["vocab"], key=table["model"]["vocab"].__getitem__)[5:]
    vocab = table["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(table))
    assert vocabulary_difference(student, teacher) == ""
    (found,) = problems(student, data, [{**TEACHER, "path": other}], data__teacher="big")
    assert found.startswith("teachers.0.path: its vocabulary differs from that of model.path (2 tokens, for example")
    (other / "tokenizer.json").unlink()
    (found,) = problems(student, data, [{**TEACHER, "path": other}], data__teacher="big")
    assert "holds no tokenizer.json" in found
    small = make_tiny_model(tmp_path / "small", vocab_size=100)
    shutil.copy(student / "tokenizer.json", small / "tokenizer.json")
    found = "\n".join(problems(student, data, [{**TEACHER, "path": small}], data__teacher="big"))
    assert "teachers.0.path: it has 100 rows of the vocabulary" in found


@pytest.mark.parametrize(
    ("fields", "changes", "reported"),
    [
        ({"path": "nowhere"}, {}, "teachers.0.path: no such directory: nowhere"),
        ({}, {"sampling__temperature": 0.7}, "sampling.temperature: 0.7, but the engines of teacher 'big' score at"),
        ({"engine_kwargs": {"model": "x"}}, {}, "teachers.0.engine_kwargs.model: reserved; set model.path"),
        ({"tensor_parallel": 3}, {}, "teachers.0.tensor_parallel: the model's"),
        (
            {"where": "trainer"},
            {"trainer__gpus": 8, "trainer__parallel": {"tensor": 8}},
            "teachers.0.where: the model'",
        ),
    ],
)
def test_what_cannot_work_is_refused(
    student: Path, teacher: Path, data: Path, fields: dict[str, Any], changes: dict[str, Any], reported: str
) -> None:
    found = problems(student, data, [{**TEACHER, "path": teacher, **fields}], data__teacher="big", **changes)
    assert any(problem.startswith(reported) for problem in found), found


def test_a_teacher_of_the_trainer_scores_at_the_temperature_of_the_samples(
    student: Path, teacher: Path, data: Path
) -> None:
    own = {**TEACHER, "path": teacher, "where": "trainer"}
    assert problems(student, data, [own], data__teacher="big", sampling__temperature=0.7) == []


def test_the_trainer_can_hold_a_megatron_checkpoint_and_an_engine_cannot(
    student: Path, teacher: Path, data: Path, tmp_path: Path
) -> None:
    convert("import", "--hf", teacher, "--out", tmp_path / "megatron")
    own = {**TEACHER, "path": tmp_path / "megatron"}
    assert problems(student, data, [{**own, "where": "trainer"}], data__teacher="big") == []
    assert problems(student, data, [own], data__teacher="big") == [
        f"teachers.0.path: {tmp_path / 'megatron'} is a Megatron checkpoint, which vLLM cannot read; convert it, or "
        "set where=trainer"
    ]


@pytest.mark.parametrize(("place", "reported"), [("loss", 1), ("reward", 0)])
def test_the_loss_has_one_term_of_a_kl(student: Path, teacher: Path, data: Path, place: str, reported: int) -> None:
    both = {"algorithm__distill": {"where": "loss"}, "algorithm__kl": {"coef": 0.1, "where": place}}
    found = problems(student, data, [{**TEACHER, "path": teacher}], data__teacher="big", **both)
    assert len(found) == reported and all(
        each.startswith("algorithm.distill.where: the loss has one") for each in found
    )


def test_a_sample_must_fit_the_teachers_context(student: Path, data: Path, tmp_path: Path) -> None:
    short = make_tiny_model(tmp_path / "short", max_position_embeddings=64)
    (found,) = problems(student, data, [{**TEACHER, "path": short}], data__teacher="big")
    assert found.startswith("teachers.0.path: it has 64 positions, and samples need 65")


def test_its_engines_have_places_and_devices_of_the_pool(student: Path, teacher: Path, data: Path) -> None:
    own = {**TEACHER, "path": teacher, "replicas": 2, "tensor_parallel": 2}
    made = config(student, data, teachers=[own], data__teacher="big", rollout={"replicas": 3})
    pool = resolve_pools(made).rollout
    assert pool.gpus == 3 + 4 and engines_per_node(pool, made.rollout, made.teachers) == 5
    with pytest.raises(ConfigError, match=r"teachers.0.tensor_parallel: 2 differs from rollout.tensor_parallel=1, so"):
        resolve_pools(config(student, data, teachers=[{**own, "replicas": 1}], data__teacher="big",
                             rollout={"replicas": 4, "gpus_per_node": 3, "nodes": "separate"}))  # fmt: skip
    with pytest.raises(ConfigError, match=r"teachers.0.tensor_parallel: 4 GPUs per engine, but a node of the pool has"):
        resolve_pools(config(student, data, teachers=[{**own, "tensor_parallel": 4}], data__teacher="big",
                             rollout={"replicas": 1, "gpus_per_node": 3, "nodes": "separate"}))  # fmt: skip
    even = config(student, data, teachers=[{**own, "tensor_parallel": 1}], data__teacher="big",
                  rollout={"replicas": 6, "gpus_per_node": 4, "nodes": "separate"})  # fmt: skip
    pool = resolve_pools(even).rollout
    assert pool.nodes == 2 and engines_per_node(pool, even.rollout, even.teachers) == 4


def test_its_engines_read_their_weights_and_inherit_nothing_of_the_policys(
    student: Path, teacher: Path, data: Path
) -> None:
    rollout = {"replicas": 3, "max_replicas": 5, "max_model_len": 48, "engine_kwargs": {"block_size": 8}}
    made = config(student, data, teachers=[{**TEACHER, "path": teacher}], data__teacher="big", rollout=rollout)
    own = engine_config(made, made.teachers[0])
    assert own.model.path == teacher and own.rollout.load_weights and own.rollout.replicas == 1
    assert own.rollout.engine_kwargs == {} and own.rollout.max_model_len is None


def test_the_plan_has_the_weights_of_teachers(student: Path, teacher: Path, data: Path) -> None:
    """Two in host memory are on the device one at a time, so the larger one counts."""
    own = {**TEACHER, "path": teacher, "where": "trainer"}
    both = [own, {**own, "name": "self", "path": student}]
    gpu = {"trainer__device_memory_gib": 80, "rollout__device_memory_gib": 80, "algorithm__kl__coef": 0.1}
    made = config(student, data, teachers=both, data=sets(data, "big", "self"), **gpu)
    plan = make_plan(made, device="cuda")
    names = {term.name: term for term in plan.trainer.terms}
    assert "weights of teacher big" in names and "weights of teacher self" not in names
    assert names["weights of teacher big"].when == "log-probs" and "reference weights" not in names
    kept = made.model_copy(update={"reference": ReferenceConfig(placement="gpu")})
    plan = make_plan(kept, device="cuda")
    always = {term.name for term in plan.trainer.terms if term.when == "always"}
    assert {"weights of teacher big", "weights of teacher self"} <= always


def test_the_plan_refuses_a_teacher_that_does_not_fit_its_gpu(student: Path, teacher: Path, data: Path) -> None:
    own = [{**TEACHER, "path": teacher, "gpu_memory_utilization": 0.05}]
    gpu = {"trainer__device_memory_gib": 80, "rollout__device_memory_gib": 80}
    with pytest.raises(ConfigError, match=r"teachers.0: .* of 4.00 GiB allowed \(teachers.0.gpu_memory_utilization\)"):
        make_plan(config(student, data, teachers=own, data__teacher="big", **gpu), device="cuda")
    plan = make_plan(config(student, data, teachers=[{**TEACHER, "path": teacher}], data__teacher="big", **gpu),
                     device="cuda")  # fmt: skip
    (found,) = plan.teachers
    assert (found.name, found.replicas, found.engine_gpus) == ("big", 1, 1) and found.memory is not None
    assert {term.when for term in found.memory.terms} == {"always", "generate"}


SHARING = {**TEACHER, "gpu_share": 0.5, "gpu_memory_utilization": 0.4}


def test_its_engines_may_be_on_the_gpus_of_the_policys(student: Path, teacher: Path, data: Path) -> None:
    own = {**SHARING, "path": teacher, "replicas": 3}
    rollout = {"replicas": 3, "gpu_memory_utilization": 0.5}
    made = config(student, data, teachers=[own], data__teacher="big", rollout=rollout)
    pool = resolve_pools(made).rollout
    assert pool.gpus == 3 and engines_per_node(pool, made.rollout, made.teachers) == 6
    gpus = policy_gpus(made.rollout, made.teachers)
    assert gpus > 0.5 and gpus + teacher_gpus(made.teachers[0]) == 1.0
    assert problems(student, data, [own], data__teacher="big", rollout=rollout) == []
    several = config(student, data, teachers=[{**own, "replicas": 8}], data__teacher="big",
                     rollout=rollout | {"replicas": 8, "gpus_per_node": 4, "nodes": "separate"})  # fmt: skip
    pool = resolve_pools(several).rollout
    assert pool.nodes == 2 and engines_per_node(pool, several.rollout, several.teachers) == 8


@pytest.mark.parametrize(
    ("own", "rollout", "said"),
    [
        ({"gpu_memory_utilization": 0.6}, {}, "rollout.gpu_memory_utilization is 0.5 of the same GPU: together 1.1"),
        ({"tensor_parallel": 2}, {}, "only engines of one GPU share it; set teachers.0.tensor_parallel to 1"),
        ({}, {"tensor_parallel": 2}, "only engines of one GPU share it; set rollout.tensor_parallel to 1"),
        ({}, {"replicas": 2}, "1 engines of teachers are on the GPUs of 2 of the policy"),
        ({}, {"max_replicas": 2}, "agree, and remove rollout.max_replicas"),
    ],
)  # fmt: skip
def test_two_engines_that_cannot_share_a_gpu_are_refused(
    student: Path, teacher: Path, data: Path, own: dict[str, Any], rollout: dict[str, Any], said: str
) -> None:
    found = problems(student, data, [{**SHARING, "path": teacher, **own}], data__teacher="big",
                     rollout={"gpu_memory_utilization": 0.5, **rollout})  # fmt: skip
    assert sum(said in each for each in found) == 1, found


def test_the_plan_adds_up_two_engines_of_one_gpu(student: Path, teacher: Path, data: Path) -> None:
    gpu = {"trainer__device_memory_gib": 80, "rollout__device_memory_gib": 80, "rollout__gpu_memory_utilization": 0.5}
    made = config(student, data, teachers=[{**SHARING, "path": teacher}], data__teacher="big", **gpu)
    plan = make_plan(made, device="cuda")
    (found,) = plan.teachers
    assert found.memory is not None and found.both is not None
    assert found.both.total("generate") == pytest.approx(0.9 * 80 * GIB, abs=GIB / 100)
    assert found.both.peak == plan.engine.memory.peak + found.memory.peak
    whole = config(student, data, teachers=[{**SHARING, "path": teacher, "gpu_memory_utilization": 0.5}],
                   data__teacher="big", **gpu)  # fmt: skip
    with pytest.raises(ConfigError, match=r"teachers.0.gpu_share: 80.0\d GiB per GPU in phase 'sync', of 80.00 GiB"):
        make_plan(whole, device="cuda")
