"""The model whose response lengths are known: its next token really follows the chain, and the tail is long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lib.length_model import (
    LengthClass,
    letters_of,
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
