"""Demonstrations: the token ids that a model would have read and written, and bounds on their length."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.chat.tokenize import PromptEncoder, PromptTooLongError, end_of_turn_ids, stop_token_ids
from megarl.config.schema.data import DataConfig
from megarl.data.dataset import DemonstrationEncoder, end_token, load_prompts


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data(**fields: Any) -> DataConfig:
    return DataConfig(**{"demonstration_field": "solution", **fields})


def encoder(model: Path, limit: int, overlong: Any = "error") -> DemonstrationEncoder:
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = end_token(tokenizer, stop_token_ids(model, tokenizer))
    return DemonstrationEncoder(PromptEncoder(tokenizer, 64, overlong), end, limit)


def test_the_response_follows_the_prompt_as_the_model_would_write_it(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "sft.jsonl", [{"problem": "1+1=?", "solution": "1+1=2 so 2"}])
    prompt = load_prompts(path, data())[0]
    assert prompt.demonstration == "1+1=2 so 2" and prompt.answer == ""
    tokenizer = AutoTokenizer.from_pretrained(model)
    shown = encoder(model, 64).encode(prompt)
    assert shown.prompt_ids == PromptEncoder(tokenizer).encode(prompt)
    assert tokenizer.decode(shown.response_ids[:-1]) == "1+1=2 so 2"
    assert shown.response_ids[-1] in stop_token_ids(model, tokenizer)
    assert shown.response_ids[-1] in (end_of_turn_ids(tokenizer) or {tokenizer.eos_token_id})


def test_the_end_is_one_that_the_model_stops_at(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert end_token(tokenizer, [7, 5]) == 5
    assert end_token(tokenizer, [5, tokenizer.eos_token_id]) in {tokenizer.eos_token_id, *end_of_turn_ids(tokenizer)}


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({}, {"problem": "1+1=?", "solution": "2", "answer": "2"}),
        ({"prompt_field": "question"}, {"question": "1+1=?", "solution": "2"}),
        ({}, {"question": "1+1=?", "answer": "so #### 2", "solution": "2"}),
        ({}, {"messages": [{"role": "user", "content": "1+1=?"}], "solution": "2"}),
        ({"demonstration_field": "extra.reply"}, {"prompt": "1+1=?", "extra": {"reply": "2"}}),
    ],
)
def test_every_format_can_have_demonstrations(tmp_path: Path, fields: dict[str, Any], row: dict[str, Any]) -> None:
    prompt = load_prompts(write(tmp_path / "sft.jsonl", [row]), data(**fields))[0]
    assert (prompt.text, prompt.demonstration) == ("1+1=?", "2")


def test_a_row_without_one_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    rows = [{"problem": "1+1=?", "solution": "2"}, {"problem": "2+2=?", "answer": "4"}]
    with pytest.raises(ValueError, match=r"sft.jsonl:2: field 'solution' is missing; the row has \['answer', 'problem"):
        load_prompts(write(tmp_path / "sft.jsonl", rows), data())


def test_a_demonstration_that_is_too_long_is_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+1=?", "solution": "2 " * n} for n in range(1, 9)]
    prompts = load_prompts(write(tmp_path / "sft.jsonl", rows), data())
    lengths = [len(encoder(model, 999).encode(prompt).response_ids) for prompt in prompts]
    limit = lengths[4]
    with pytest.raises(PromptTooLongError, match=rf":6 has {lengths[5]} tokens, more than samp"):
        encoder(model, limit).valid_indices(prompts, range(8))
    skipping = encoder(model, limit, "skip")
    assert list(skipping.valid_indices(prompts, [0, 4, 5, 7])) == [0, 4] and skipping.skipped == 2
    with pytest.raises(ValueError, match="all 2 demonstrations are longer than 1 tokens"):
        encoder(model, 1, "skip").valid_indices(prompts, [0, 1])
