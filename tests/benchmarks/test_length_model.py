"""The model whose response lengths are known: its next token really follows the chain, and the tail is long."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.length_model import (
    LETTERS,
    LengthClass,
    eos_log_odds,
    letter_share,
    letters_of,
    quantile,
    write_model,
    write_prompts,
)

CLASSES = (LengthClass(0.7, 12), LengthClass(0.2, 40), LengthClass(0.1, 200))


def test_the_end_comes_as_often_as_the_class_of_the_prompt_says(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CLASSES, hidden=128, layers=2)
    write_prompts(tmp_path / "prompts.jsonl", CLASSES, 60)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    problems = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    for index, chosen in enumerate(CLASSES):
        problem = next(row["problem"] for row in problems if row["answer"] == letters_of(index)[0])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True, tokenize=False
        )
        # The first token of a response, and the one after twenty letters of the class.
        for response in ("", letters_of(index) * 5):
            ids = torch.tensor([tokenizer(text + response, add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                chances_V = model(input_ids=ids).logits[0, -1].softmax(-1)
            own = chances_V[tokenizer.convert_tokens_to_ids(list(letters_of(index)))].sum().item()
            end = chances_V[tokenizer.eos_token_id].item()
            assert end == pytest.approx(1 / chosen.mean, rel=0.15)
            assert own + end > 0.999


def test_prompts_are_different_and_divided_as_asked(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.jsonl", CLASSES, 2000)
    write_prompts(tmp_path / "b.jsonl", CLASSES, 2000)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len({row["problem"] for row in rows}) == 2000
    assert all(row["problem"].endswith(row["answer"]) for row in rows)
    for index, chosen in enumerate(CLASSES):
        assert sum(row["answer"] in letters_of(index) for row in rows) / 2000 == pytest.approx(chosen.share, abs=0.03)


def test_classes_have_letters_of_their_own() -> None:
    letters = "".join(letters_of(index) for index in range(len(CLASSES)))
    assert len(set(letters)) == len(letters) == LETTERS * len(CLASSES)


@pytest.mark.parametrize("mean", [2, 12, 200])
def test_odds_of_the_end(mean: float) -> None:
    odds = torch.tensor(eos_log_odds(mean)).exp().item()
    assert odds / (odds + LETTERS) == pytest.approx(1 / mean)


def test_a_model_that_is_too_narrow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        write_model(tmp_path / "model", CLASSES, hidden=64, layers=1)


def test_reward() -> None:
    assert (letter_share("abca", "a"), letter_share("", "a")) == (0.5, 0.0)


def test_quantile() -> None:
    values = list(range(100))
    random.Random(0).shuffle(values)
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([3], 0.99)) == (50, 99, 3)
