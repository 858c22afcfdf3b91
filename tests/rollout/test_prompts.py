"""Which prompts a run takes: every one that is drawn fits, with its response, where it has to go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.checks import check, evaluation_prompt_limit, prompt_limit
from megarl.config.schema import Config
from megarl.models.read_config import load_info
from megarl.rollout.prompts import PromptSource
from tests.support.pool import pool_config
from tests.support.tiny import make_tiny_model

RESPONSE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("prompts") / "model")


def config(tmp_path: Path, model: Path, **sections: Any) -> Config:
    return pool_config(tmp_path, model, **{"data": {"max_prompt_tokens": None}, **sections})


@pytest.mark.parametrize(
    ("sections", "tokens", "setting"),
    [
        ({"data": {"max_prompt_tokens": 64}}, 64, "data.max_prompt_tokens"),
        ({"trainer": {"micro_batch_tokens": 100}}, 84, "trainer.micro_batch_tokens - sampling.max_tokens"),
        # Longer responses of an evaluation are never packed.
        ({"trainer": {"micro_batch_tokens": 100}, "evaluation": {"max_tokens": 48}}, 84, "trainer.micro_batch_tokens"),
        ({"rollout": {"max_model_len": 90}}, 74, "rollout.max_model_len - the longest response"),
        ({}, 512 - RESPONSE, "the model's positions - the longest response"),
    ],
)
def test_the_tightest_setting_bounds_a_prompt(
    model: Path, tmp_path: Path, sections: dict[str, Any], tokens: int, setting: str
) -> None:
    planned = config(tmp_path, model, **sections)
    check(planned, device="cpu")
    limit = prompt_limit(planned, load_info(model))
    assert limit.tokens == tokens and limit.setting.startswith(setting)


def test_what_is_only_evaluated_needs_no_room_in_a_micro_batch(model: Path, tmp_path: Path) -> None:
    planned = config(tmp_path, model, trainer={"micro_batch_tokens": 100})
    assert evaluation_prompt_limit(planned, load_info(model)).tokens == 512 - RESPONSE
    assert len(PromptSource(planned).eval_sets()) == 1


def test_a_prompt_that_no_micro_batch_could_hold_is_refused_or_left_out_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    lengths = [len(PromptSource(config(tmp_path, model)).draw(group).ids) for group in range(32)]
    room = sorted(set(lengths))[-2]
    trainer = {"micro_batch_tokens": room + RESPONSE}
    with pytest.raises(ValueError, match=rf"more than trainer.micro_batch_tokens - sampling.max_tokens = {room}"):
        PromptSource(config(tmp_path, model, trainer=trainer))
    skipping = {"max_prompt_tokens": None, "overlong_prompts": "skip"}
    source = PromptSource(config(tmp_path, model, trainer=trainer, data=skipping))
    assert source.skipped == sum(length > room for length in lengths) > 0
    assert max(len(source.draw(group).ids) for group in range(32)) <= room
