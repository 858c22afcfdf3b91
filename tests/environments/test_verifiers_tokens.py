"""verifiers' training client keeps the sampled tokens in the later turns of a dialogue if it has the model's renderer.

The model samples its words letter by letter, which its tokenizer would never do: tokens that were made again would be
fewer. make nightly-environments; or MEGARL_VERIFIERS_PYTHON=DIR/bin/python with requirements/environments.lock.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import load_tokenizer
from megarl.queue.trajectory import Trajectory
from tests.support.gateway.verifiers_play import exported, needs_verifiers, play
from tests.support.models.chat_templates import chat_tokenizer

pytestmark = needs_verifiers
QWEN3 = {"name": "qwen3", "thinking_retention": "all"}
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TWICE = [{"task_data": {"idx": index, "prompt": f"Count to {index}."}} for index in (3, 4)]
END = 2


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the tokens that verifiers' renderer of Qwen3 looks for, in which words are several letters."""
    directory = tmp_path_factory.mktemp("qwen3")
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.add_tokens(list(TAGS))
    tokenizer.save_pretrained(directory)
    return directory


def spelled(model: Path, text: str) -> list[int]:
    """The tokens of a text letter by letter, which are more than those that the tokenizer makes of it."""
    tokenizer = load_tokenizer(model)
    ids = [each for letter in text for each in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(ids) == text and len(ids) > len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids


def check_exact(rows: list[Trajectory], prompts: list[list[int]], said: list[list[int]]) -> None:
    """Each prompt begins with all tokens before it, and the sample is one row of them that trains what was sampled."""
    [row] = rows
    assert row.status == "ok", row.failure
    so_far, mask = prompts[0], []
    for prompt, ids in zip(prompts, said, strict=True):
        assert prompt[: len(so_far)] == so_far
        mask += [0] * (len(prompt) - len(so_far)) + [1] * len(ids)
        so_far = prompt + ids
    assert (row.prompt_ids, row.response_ids) == (prompts[0], so_far[len(prompts[0]) :])
    assert row.response_mask == mask


def test_a_second_question_continues_the_sampled_tokens(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    ids = spelled(chat_model, "the number of students")
    options: dict[str, Any] = {"client": "train", "renderer": str(chat_model), "renderer_config": QWEN3}
    [rows], gateway = play(gateways, chat_model, tmp_path, "asked_twice", TWICE[:1], lambda prompt: ids, **options)
    prompts = [request.prompt_ids for request in gateway.call(lambda parts: parts.replicas[0].asked)]
    check_exact(rows, prompts, [[*ids, END]] * 2)
    assert rows[0].reward == 2.0 and "Once more?" in load_tokenizer(chat_model).decode(prompts[1])


def test_a_call_of_a_tool_continues_the_sampled_tokens(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    """The renderer shows the tool, reads the call, and writes the tool's answer after the tokens of the call."""
    [task] = exported(tmp_path, "sums_tasks", 1, {"digits": 4})
    tokenizer, total = load_tokenizer(chat_model), str(task["task_data"]["total"])
    said: list[list[int]] = []

    def say(prompt: str) -> list[int]:
        if said:
            ids = spelled(chat_model, f"the sum is {total}")
        else:
            a, b = prompt.rpartition("What is ")[2].partition("?")[0].split(" + ")
            call = json.dumps({"name": "add", "arguments": {"a": int(a), "b": int(b)}})
            begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
            ids = [begin, *spelled(chat_model, f"\n{call}\n"), end]
        said.append([*ids, END])
        return ids

    options: dict[str, Any] = {"client": "train", "renderer": str(chat_model), "renderer_config": QWEN3}
    [rows], gateway = play(gateways, chat_model, tmp_path, "sums_tasks", [task], say, **options)
    prompts = [request.prompt_ids for request in gateway.call(lambda parts: parts.replicas[0].asked)]
    check_exact(rows, prompts, said)
    assert rows[0].reward_components == {"correct": 1.0, "tool_answers": 1.0}
    assert "Add two whole numbers." in tokenizer.decode(prompts[0])
    assert f"<tool_response>\n{total}\n</tool_response>" in tokenizer.decode(prompts[1])


@pytest.mark.parametrize("config", [{"name": "default"}, {"name": "qwen3"}])
def test_a_turn_that_is_tokenized_again_is_reported_once(
    gateways: Any, chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    """The default renderer does it always, and that of Qwen3 at a new question, to drop the reasoning before it."""
    ids = spelled(chat_model, "the number of students")
    options: dict[str, Any] = {"client": "train", "renderer": str(chat_model), "renderer_config": config}
    samples, _ = play(gateways, chat_model, tmp_path, "asked_twice", TWICE, lambda prompt: ids, **options)
    for rows in samples:
        assert [(row.status, row.response_ids) for row in rows] == [("ok", [*ids, END])] * 2
    [reported] = [record.getMessage() for record in caplog.records if "renderer_config" in record.message]
    assert reported.startswith("sample 3:") and " became 2 rows: " in reported
