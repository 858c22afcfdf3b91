"""The example environments in the real environment server of verifiers 0.4, over the gateway with a stand-in engine.

make nightly-environments; or MEGARL_VERIFIERS_PYTHON=DIR/bin/python with requirements/environments.lock installed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import load_tokenizer
from tests.support.gateway.verifiers_play import exported, needs_verifiers, play

pytestmark = needs_verifiers


def test_the_tool_environment_is_judged_and_its_dialogue_is_the_sample_s(
    gateways: Any, chat_model: Path, tmp_path: Path
) -> None:
    """The model calls the tool with the numbers of the question, and then says what the tool has answered."""
    rows = exported(tmp_path, "sums_tasks", 3, {"digits": 4})

    def say(prompt: str) -> str:
        if "<|im_start|>tool" in prompt:
            return prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
        a, b = prompt.rpartition("What is ")[2].partition("?")[0].split(" + ")
        call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    samples, gateway = play(gateways, chat_model, tmp_path, "sums_tasks", rows, say)
    tokenizer = load_tokenizer(chat_model)
    for [row], task in zip(samples, rows, strict=True):
        assert row.status == "ok" and row.reward == 1.0, row.failure
        assert row.reward_components == {"correct": 1.0, "tool_answers": 1.0}
        inserted = tokenizer.decode([t for t, m in zip(row.response_ids, row.response_mask, strict=True) if not m])
        assert str(task["task_data"]["total"]) in inserted
    assert gateway.call(lambda parts: len(parts.sessions)) == 0


@pytest.mark.parametrize("client", ["eval", "train"])
def test_reasoning_gym_judges_by_itself(gateways: Any, chat_model: Path, tmp_path: Path, client: Any) -> None:
    rows = exported(tmp_path, "gym_tasks", 2, {"options": {"max_terms": 2, "max_digits": 2}})
    answers = [row["task_data"]["entry"]["answer"] for row in rows]
    asked = [row["prompt"] for row in rows]
    environment = {}
    options: dict[str, Any] = {"client": client, "environment": environment}

    def say(prompt: str) -> str:
        number = next(n for n, text in enumerate(asked) if text in prompt)
        return answers[number] if number == 0 else "no idea"

    if client == "train":
        options |= {"renderer": str(chat_model), "renderer_config": {"name": "default"}}
    samples, _ = play(gateways, chat_model, tmp_path, "gym_tasks", rows, say, **options)
    [right], [wrong] = samples
    assert (right.status, right.reward) == ("ok", 1.0), right.failure
    assert (wrong.status, wrong.reward < 1.0) == ("ok", True)


def test_gsm8k_compares_the_last_number(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    problem = {"question": "What is 1,000 + 200?", "answer": "Add them.\n#### 1,200"}
    file.write_text("".join(json.dumps(problem) + "\n" for _ in range(2)))
    rows = exported(tmp_path, "gsm8k_tasks", 2, {"file": str(file)})
    said = iter(["First 7, so it is 1200.", "1201"])
    samples, _ = play(gateways, chat_model, tmp_path, "gsm8k_tasks", rows, lambda prompt: next(said))
    assert sorted(row.reward for [row] in samples) == [0.0, 1.0]


def test_a_row_without_a_task_is_named(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    from megarl.common.errors import ToolFailed

    with pytest.raises(ToolFailed, match=r"the environment failed in sample 3:1: .*no object 'task_data'"):
        play(gateways, chat_model, tmp_path, "sums_tasks", [{"prompt": "x"}], lambda prompt: "x")


def test_a_task_that_the_taskset_refuses_fails_its_sample_alone(
    gateways: Any, chat_model: Path, tmp_path: Path
) -> None:
    rows = [{"task_data": {"prompt": "x"}}]
    [[row]], _ = play(gateways, chat_model, tmp_path, "sums_tasks", rows, lambda prompt: "x")
    assert row.status == "failed" and "total" in row.failure
