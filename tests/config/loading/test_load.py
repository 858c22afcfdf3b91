from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.common.errors import ConfigError
from megarl.config.loading.load import (
    USUAL_NAMES,
    load_config,
    parse_override,
    parse_yaml,
    to_yaml,
    walk_keys,
)

GOOD = """
run: {name: a, steps: 3}
model: {path: models/a}
batch: {groups: 4, samples_per_group: 4}
sampling: {max_tokens: 12}
data: {path: d.jsonl}
trainer:
  optimizer: {lr: 1e-5, betas: [0.9, 0.99]}
evaluation:
  sets:
    - {name: heldout, path: h.jsonl}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_values_and_defaults(good: Path) -> None:
    config = load_config(good)
    assert config.trainer.optimizer.lr == 1e-5  # plain PyYAML would read a string
    assert config.trainer.optimizer.betas == (0.9, 0.99)
    assert config.evaluation.sets[0].path == Path("h.jsonl")
    assert config.run_dir == Path("runs/a")
    assert config.sampling.temperature == 1.0


def test_resolved_yaml_reads_back_equal(good: Path, tmp_path: Path) -> None:
    config = load_config(good, ["megatron.transformer.recompute_granularity=full", "rollout.devices=[1, 2]"])
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config


def test_overrides_are_yaml_typed_and_the_last_wins(good: Path) -> None:
    config = load_config(
        good,
        ["run.steps=7", "run.steps=8", "algorithm.kl.coef=3", "data.system_prompt=", "trainer.optimizer.lr=3E-4",
         "megatron.ddp.overlap_grad_reduce=true", "rollout.engine_kwargs={block_size: 16}"],
    )  # fmt: skip
    assert config.run.steps == 8
    assert config.algorithm.kl.coef == 3.0
    assert config.data.system_prompt is None
    assert config.trainer.optimizer.lr == 3e-4
    assert config.megatron.ddp == {"overlap_grad_reduce": True}
    assert config.rollout.engine_kwargs == {"block_size": 16}


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        ("sampling.temprature=1", "sampling.temprature: no such key; did you mean sampling.temperature?"),
        ("trainer.lr=1", "did you mean trainer.optimizer.lr?"),
        ("learning_rate=1", "learning_rate: no such key; did you mean trainer.optimizer.lr?"),
        ("run.steps=0", "run.steps: must be at least 1, not 0 (on the command line: run.steps=0)"),
        (
            "nonsense.x=1",
            "nonsense: no such key; keys of the top level: admission, agent, algorithm, batch,",
        ),
        ("run.steps=many", "run.steps: must be an integer, not 'many'"),
        ("run.steps=true", "run.steps: must be an integer, not True"),
        ("run.name=7", "run.name: must be a string, not 7; put it in quotes"),
        ("model.load_weights=1", "model.load_weights: must be true or false, not 1"),
        ("trainer.precision=fp16", "trainer.precision: must be one of 'bf16' or 'fp32', not 'fp16'"),
        ("trainer.parallel=4", "trainer.parallel: must be a section"),
        ("trainer.optimizer.lr.x=4", "trainer.optimizer.lr.x: trainer.optimizer.lr is not a section"),
        ("evaluation.sets.0.path=x", "evaluation.sets: a list; override it as a whole"),
        ("evaluation.sets=[{name: a, path: b, foo: 1}]", "evaluation.sets.0.foo: no such key"),
        ("evaluation.sets=[{name: a}]", "evaluation.sets.0.path: required"),
        ("timeouts.generate_s=.inf", "timeouts.generate_s: must be a finite number, not inf"),
        ("trainer.optimizer.lr=.nan", "trainer.optimizer.lr: must be a finite number, not nan"),
        ("reward.kwargs={a: 1, b: [2.0, {c: .inf}]}", "reward.kwargs.b.1.c: must be a finite number, not inf"),
        ("megatron.optimizer.eps=.nan", "megatron.optimizer.eps: must be a finite number"),
        ("admission.max_staleness=-1", "admission.max_staleness: must be at least 0"),
        ("algorithm.correction.cap=much", "algorithm.correction.cap: must be a number, not 'much'"),
        ("admission.partial_rollout=false", "no such key; did you mean rollout.partial_rollout?"),
        ("run.steps", "override 'run.steps': write section.key=value"),
        ("=3", "write section.key=value"),
        ("run.steps=[1", "override 'run.steps=[1': not valid YAML: while parsing a flow sequence in line 1, column 1"),
        ("data={path: a, path: b}", "override 'data={path: a, path: b}': path: given twice"),
    ],
)
def test_one_clear_message_per_mistake(good: Path, override: str, reported: str) -> None:
    message = complaint(good, override)
    assert reported in message
    assert str(good) not in message and override in message  # the file is innocent
    assert "Traceback" not in message and "pydantic" not in message


def test_a_problem_is_reported_with_the_override_that_made_it_and_the_file_with_its_own(good: Path) -> None:
    good.write_text(GOOD.replace("max_tokens: 12", "max_tokens: 0"))
    overrides = ["run.steps=0", "run.steps=-1", "run.name=other", "algorithm.correction.cap=much"]
    assert complaint(good, *overrides) == (
        f"{good}: 3 problems"
        "\n  - run.steps: must be at least 1, not -1 (on the command line: run.steps=-1)"
        "\n  - algorithm.correction.cap: must be a number, not 'much' (on the command line: "
        "algorithm.correction.cap=much)"
        "\n  - sampling.max_tokens: must be at least 1, not 0"
    )
    assert str(good) not in complaint(good, "sampling.max_tokens=4", "trainer.gpus=0")


def test_all_problems_at_once(good: Path) -> None:
    message = complaint(good, "run.stepz=1", "trainer.gpus=0", "sampling.temperature=hot")
    assert "3 problems" in message
    assert all(key in message for key in ("run.stepz", "trainer.gpus", "sampling.temperature"))


def test_missing_required_key_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD.replace("steps: 3", "seed: 3"))
    assert "run.steps: required; Number of training steps." in complaint(path)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("run: {name: a, name: b}", "name: given twice, in lines 1 and 1"),
        ("run:\n  seed: 1\nrun:\n  seed: 2", "run: given twice, in lines 1 and 3"),
        ("run: [1, 2", "not valid YAML"),
        ("- a\n- b", "must hold sections"),
        ("1: {}", "the key 1 is not a string"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert reported in complaint(path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert "no such config file; current directory" in complaint(tmp_path / "none.yaml")
    assert "cannot be read" in complaint(tmp_path)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_an_override(value: float) -> None:
    assert parse_override(f"a.b={value!r}") == (["a", "b"], value)
    assert float(parse_yaml(f"{value:e}")) == pytest.approx(value, rel=1e-5)


def test_every_key_has_a_meaning() -> None:
    from megarl.config.loading.load import section_of
    from megarl.config.schema import Config

    def walk(section: type, prefix: str) -> None:
        assert section.__doc__, prefix
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            inner = section_of(field.annotation)
            assert field.description or inner, f"{prefix}{name}"
            if inner is not None:
                walk(inner, f"{prefix}{name}.")

    walk(Config, "")
    assert "trainer.optimizer.lr" in set(walk_keys())


def test_what_other_trainers_call_a_key_is_one_of_ours() -> None:
    known = set(walk_keys())
    assert set(USUAL_NAMES.values()) <= known
    assert not USUAL_NAMES.keys() & {key.rsplit(".", 1)[-1] for key in known}
