"""Several sets in a config: what a set inherits, what it has for itself, and each mistake with its fix."""

from pathlib import Path
from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks.sections import check, longest_response, prompt_limit
from megarl.config.derived.datasets import (
    held_out_sets,
    longest_training_response,
    own_temperatures,
    response_limits,
    reward_functions,
    train_sets,
)
from megarl.config.loading.load import config_from_tree, to_yaml
from megarl.config.schema import Config
from megarl.models.hf.read_config import load_info
from tests.support.trainer.configs import config as config_of

Models = dict[str, Path]

SECTIONS: dict[str, Any] = {
    "data__path": None,
    "data__suffix": " Go.",
    "data__system_prompt": "Be brief.",
    "data__chat_template_kwargs": {"enable_thinking": True},
    "reward": {"function": "gsm8k", "kwargs": {"strict": True}, "on_error": -1.0},
    "sampling__temperature": 0.9,
    "evaluation__max_tokens": 64,
}


def several(*sets: dict[str, Any], path: Path | str = "x.jsonl", **changes: Any) -> Config:
    named = [{"name": f"set{index}", "path": str(path)} | each for index, each in enumerate(sets)]
    return config_of("model", **{**SECTIONS, "data__sets": named, **changes})


def test_a_set_without_keys_of_its_own_is_the_section() -> None:
    config = several({}, {"weight": 2.5})
    first, second = train_sets(config)
    assert (first.name, first.weight, second.name, second.weight) == ("set0", 1.0, "set1", 2.5)
    for each in (first, second):
        assert each.data.model_dump(exclude={"path", "sets"}) == config.data.model_dump(exclude={"path", "sets"})
        assert (each.path, each.reward, each.sampling) == (Path("x.jsonl"), config.reward, config.sampling)
    assert list(reward_functions(config)) == ["reward"] and own_temperatures(config) == {}
    assert response_limits(config) == {"set0": 32, "set1": 32}


def test_a_set_has_its_own_keys_and_the_rest_from_the_sections() -> None:
    own = {
        "format": "fields",
        "prompt_field": "q",
        "answer_field": "a",
        "system_prompt": "",
        "suffix": "",
        "chat_template_kwargs": {},
        "reward": {"function": "math"},
        "sampling": {"max_tokens": 48},
    }
    config = several(own, {"reward": {"kwargs": {"strict": False}}, "sampling": {"temperature": 0.6}})
    first, second = train_sets(config)
    data = first.data
    assert (data.format, data.prompt_field, data.answer_field) == ("fields", "q", "a")
    assert (data.system_prompt, data.suffix, data.chat_template_kwargs) == (None, "", {})  # given, and empty
    assert (first.reward.function, first.reward.kwargs, first.reward.on_error) == ("math", {}, -1.0)
    assert (first.sampling.max_tokens, first.sampling.temperature) == (48, 0.9)
    assert (second.reward.function, second.reward.kwargs) == ("gsm8k", {"strict": False})
    assert (second.data.system_prompt, second.sampling.max_tokens) == ("Be brief.", 32)
    assert own_temperatures(config) == {"set0": 0.9, "set1": 0.6}
    assert (response_limits(config), longest_training_response(config.data, config.sampling).tokens) == (
        {"set0": 48, "set1": 32},
        48,
    )
    assert list(reward_functions(config)) == ["data.sets.0.reward", "data.sets.1.reward"]


def test_held_out_sets_inherit_from_data_reward_and_evaluation() -> None:
    sets = [
        {"name": "plain", "path": "a.jsonl"},
        {"name": "aime", "path": "b.jsonl", "max_tokens": 256, "sampling": {"samples": 32, "temperature": 0.6},
         "chat_template_kwargs": {"enable_thinking": False}, "reward": {"function": "math"}, "system_prompt": ""},
    ]  # fmt: skip
    config = several({}, evaluation__sets=sets, evaluation__sampling={"top_p": 0.95, "samples": 4})
    plain, aime = held_out_sets(config)
    assert (plain.max_tokens, plain.sampling.samples, plain.sampling.temperature) == (64, 4, 1.0)
    assert (plain.data.system_prompt, plain.data.suffix, plain.reward.function) == ("Be brief.", " Go.", "gsm8k")
    assert (aime.max_tokens, aime.sampling.samples, aime.sampling.temperature, aime.sampling.top_p) == (
        256, 32, 0.6, 0.95,
    )  # fmt: skip
    assert (aime.data.system_prompt, aime.data.chat_template_kwargs) == (None, {"enable_thinking": False})
    assert list(reward_functions(config)) == ["reward", "evaluation.sets.1.reward"]
    assert longest_response(config.data, config.sampling, config.evaluation).tokens == 256


def test_a_run_of_one_file_has_one_set_without_a_name() -> None:
    config = config_of("model")
    [only] = train_sets(config)
    assert (only.name, only.path, only.data, only.sampling) == ("", Path("prompts.jsonl"), config.data, config.sampling)
    assert (response_limits(config), own_temperatures(config)) == ({}, {})


def test_the_pool_reads_the_same_sets_from_the_json_that_it_is_sent() -> None:
    config = several({"system_prompt": "", "reward": {"function": "math"}}, {"sampling": {"temperature": 0.6}})
    assert train_sets(Config.model_validate_json(config.model_dump_json())) == train_sets(config)
    import yaml

    assert train_sets(config_from_tree(yaml.safe_load(to_yaml(config)))) == train_sets(config)


def test_prompts_need_room_alongside_the_longest_response_of_their_own_set(models: Models, data: Path) -> None:
    config = several({}, {"sampling": {"max_tokens": 100}}, path=data, model__path=str(models["qwen3"]),
                     data__max_prompt_tokens=None)  # fmt: skip
    info = load_info(models["qwen3"])
    limits = [prompt_limit(config, info, each.sampling.max_tokens).tokens for each in train_sets(config)]
    assert limits == [256 - 32, 256 - 100]


CURRICULUM = {"function": "tests.support.agents.curricula:equal_shares"}
MISTAKES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([], {"data__path": None}, "data.path: required; give a JSONL or Parquet file, or several in data.sets"),
    ([{}, {}], {"data__path": "x.jsonl"}, "data.path: given together with data.sets"),
    ([{}, {"name": "set0"}], {}, "data.sets.1.name: 'set0' is given twice; rename one"),
    ([{}, {"name": "a/b"}], {}, "data.sets.1.name: 'a/b' must be non-empty and without '/'"),
    ([{}, {"name": " "}], {}, "data.sets.1.name: ' ' must be non-empty"),
    ([{}, {"path": "nowhere.jsonl"}], {}, "data.sets.1.path: no such file: nowhere.jsonl"),
    ([{}, {"reward": {"function": "gsm9k"}}], {}, "sets.1.reward.function: 'gsm9k' is neither code, gsm8k, math nor"),
    ([{}, {"reward": {"function": "no_such_x:f"}}], {}, "data.sets.1.reward.function: no module 'no_such_x'"),
    ([{}], {"data__curriculum": CURRICULUM}, "data.curriculum: changes the weights of several sets; list at least two"),
    ([{}, {}], {"data__curriculum": {"function": "f"}}, "data.curriculum.function: 'f' is not an import path"),
    ([{}, {"chat_template_kwargs": {"tokenize": True}}], {},
     "data.sets.1.chat_template_kwargs.tokenize: set by megarl"),
    ([{}, {}], {"data__chat_template_kwargs": {"padding": True}}, "data.chat_template_kwargs.padding: set by megarl"),
    ([{}, {"sampling": {"max_tokens": 4}}], {"algorithm__overlong": {"buffer_tokens": 5}},
     "data.sets.1.sampling.max_tokens: 4 is less than algorithm.overlong.buffer_tokens=5"),
    ([{}, {"sampling": {"max_tokens": 512}}], {},
     "data.sets.1.sampling.max_tokens: responses of 512 tokens leave no room"),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "changes", "reported"), MISTAKES, ids=lambda value: str(value)[:50])
def test_each_mistake_is_named_with_its_fix(
    models: Models, data: Path, sets: list[dict[str, Any]], changes: dict[str, Any], reported: str
) -> None:
    changes = {"model__path": str(models["qwen3"]), "reward": {"function": "gsm8k"}, **changes}
    with pytest.raises(ConfigError) as caught:
        check(several(*sets, path=data, **changes), device="cpu")
    assert any(reported in problem for problem in caught.value.problems), caught.value.problems
    good = several({}, {}, path=data, model__path=str(models["qwen3"]), reward={"function": "gsm8k"})
    check(good, device="cpu")
