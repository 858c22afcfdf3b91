"""The task of `make agents`: its demonstrations are dialogues with the calculator, as the model will meet them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from examples.quickstart.__main__ import TASKS, main
from examples.quickstart.build import build_assets
from examples.quickstart.demonstrations import read_problems
from examples.quickstart.products_task import CALLS, DEMONSTRATIONS, HELD_OUT, TOOL, Product, ProductsTask
from examples.quickstart.warm_start import WarmStart, encode_corpus
from megarl.config.loading.load import load_config
from megarl.models.hf.read_config import load_info
from tests.support.checkout import ROOT

SCHEMA = {"type": "function", "function": {"name": TOOL, "description": "Adds.", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("agents") / "assets"
    assert build_assets(out, 3, WarmStart(steps=2, batch=8, warmup=1, threads=1), ProductsTask())
    return out


@pytest.fixture(scope="module")
def tokenizer(assets: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(assets / "model")


def test_answers_are_products_and_a_fifth_of_the_demonstrations_calls_the_tool(assets: Path) -> None:
    rows = {
        name: [json.loads(line) for line in (assets / f"{name}.jsonl").read_text().splitlines()]
        for name in ("warm_start", "train", "heldout")
    }
    assert len(rows["heldout"]) == HELD_OUT >= 500
    for row in (*rows["train"], *rows["heldout"], *rows["warm_start"]):
        first, second = row["problem"].removeprefix("What is ").removesuffix("?").split(" * ")
        assert int(first) * int(second) == int(row["answer"])
    calls = sum(row["solution"].startswith("<tool_call>") for row in rows["warm_start"])
    assert calls * DEMONSTRATIONS == len(rows["warm_start"]) * CALLS


def test_the_config_plans_the_model_that_is_made(assets: Path) -> None:
    shape = load_config(ROOT / "examples/rl/configs/agents_cpu.yaml").model.shape
    assert shape and load_info(ROOT / shape) == load_info(assets / "model")


def test_a_problem_is_in_one_set_only(assets: Path) -> None:
    problems = read_problems(assets)
    ProductsTask().check(problems)
    problems["train"].append(problems["heldout"][0])
    with pytest.raises(AssertionError, match="heldout and train share 1 problems"):
        ProductsTask().check(problems)


def test_a_demonstration_with_a_call_is_the_dialogue_that_the_template_writes(tokenizer: AutoTokenizer) -> None:
    """The tool's answer is read and not learned."""
    task = ProductsTask()
    data = task.data(3)
    found = next(each for each in task.demonstrations(tokenizer, data) if each.between)
    item = Product(*(int(each) for each in found.prompt.split("What is ")[1].split("?")[0].split(" * ")))
    call = {"function": {"name": TOOL, "arguments": {"expression": f"{item.a}*{item.b}"}}}
    messages = [
        {"role": "user", "content": item.problem},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": item.answer},
        {"role": "assistant", "content": item.final},
    ]
    whole = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False)
    ids, labels = encode_corpus(tokenizer, [found])
    assert tokenizer.decode(ids[0]) == whole.removesuffix("\n")
    learned = torch.where(labels[0] >= 0, labels[0], tokenizer.pad_token_id)
    pad = tokenizer.pad_token
    kept = [part for part in tokenizer.decode(learned).split(pad) if part]
    assert kept == [f"{item.call}<|im_end|>", f"{item.final}<|im_end|>"]


def test_the_tool_is_offered_only_where_there_is_one(tokenizer: AutoTokenizer) -> None:
    messages = [{"role": "user", "content": "x"}]
    without = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    offered = tokenizer.apply_chat_template(messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    assert offered == f"<|im_start|>system\ntools: {TOOL}<|im_end|>\n{without}"


@pytest.mark.slow
def test_the_command_line_makes_each_task(tmp_path: Path, assets: Path) -> None:
    assert set(TASKS) == {"additions", "calculator", "bars"}
    out = tmp_path / "assets"
    assert main(["--task", "calculator", "--out", str(out), "--warm-start-steps", "1"]) == 0
    assert json.loads((out / "assets.json").read_text())["task"] == "calculator"
    stamp = (out / "assets.json").stat().st_mtime_ns
    assert main(["--task", "calculator", "--out", str(out), "--warm-start-steps", "1"]) == 0
    assert (out / "assets.json").stat().st_mtime_ns == stamp
