"""The example environments in the real environment server of verifiers 0.4, over the door with a stand-in engine.

make test-environments; or MEGARL_VERIFIERS_PYTHON=DIR/bin/python with requirements/environments.lock installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.data.tokenize import load_tokenizer
from megarl.environments.verifiers_loop import Verifiers
from megarl.queue.trajectory import Trajectory
from megarl.rollout.requests import GenerateRequest
from tests.support.checkout import ROOT
from tests.support.harness_context import SAMPLING, Context, announce

VARIABLE = "MEGARL_VERIFIERS_PYTHON"
EXAMPLES = ROOT / "examples/rl/environments"
pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python with verifiers 0.4.0")


def exported(tmp_path: Path, taskset: str, count: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that the exporter writes."""
    file = tmp_path / "rows.jsonl"
    command = [os.environ[VARIABLE], str(EXAMPLES / "export_tasks.py"), taskset, "--count", str(count)]
    command += ["--out", str(file), "--config", json.dumps(config)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def play(doors: Any, chat_model: Path, tmp_path: Path, taskset: str, rows: Sequence[dict[str, Any]], say: Any,
         **options: Any) -> tuple[list[list[Trajectory]], Any]:  # fmt: skip
    """Run one sample for each row; `say(prompt text)`: the text of the model's answer."""
    tokenizer = load_tokenizer(chat_model)

    def answer(request: GenerateRequest) -> list[int]:
        text = say(tokenizer.decode(request.prompt_ids))
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], 2]

    door = doors(answer)
    announce(door, tmp_path)
    loop = Verifiers(taskset, os.environ[VARIABLE], [str(EXAMPLES)], **options)

    async def all_rows() -> list[list[Trajectory]]:
        contexts = [Context(tmp_path, row=row) for row in rows]
        for ctx in contexts:
            ctx.prompt.sampling = SAMPLING.__class__(400, 1.0, SAMPLING.stop_token_ids)
        try:
            async with asyncio.timeout(240):
                return await asyncio.gather(*(loop.run(ctx) for ctx in contexts))  # type: ignore[arg-type]
        finally:
            await loop.close()

    return asyncio.run(all_rows()), door


def test_the_tool_environment_is_judged_and_its_dialogue_is_the_sample_s(
    doors: Any, chat_model: Path, tmp_path: Path
) -> None:
    """The model calls the tool with the numbers of the question, and then says what the tool has answered."""
    rows = exported(tmp_path, "sums_tasks", 3, {"digits": 4})

    def say(prompt: str) -> str:
        if "<|im_start|>tool" in prompt:
            return prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
        a, b = prompt.rpartition("What is ")[2].partition("?")[0].split(" + ")
        call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    samples, door = play(doors, chat_model, tmp_path, "sums_tasks", rows, say)
    tokenizer = load_tokenizer(chat_model)
    for [row], task in zip(samples, rows, strict=True):
        assert row.status == "ok" and row.reward == 1.0, row.failure
        assert row.reward_components == {"correct": 1.0, "tool_answers": 1.0}
        inserted = tokenizer.decode([t for t, m in zip(row.response_ids, row.response_mask, strict=True) if not m])
        assert str(task["task_data"]["total"]) in inserted
    assert door.call(lambda parts: len(parts.sessions)) == 0


@pytest.mark.parametrize("client", ["eval", "train"])
def test_reasoning_gym_judges_by_itself(doors: Any, chat_model: Path, tmp_path: Path, client: Any) -> None:
    rows = exported(tmp_path, "gym_tasks", 2, {"options": {"max_terms": 2, "max_digits": 2}})
    answers = [row["task_data"]["entry"]["answer"] for row in rows]
    asked = [row["prompt"] for row in rows]
    environment = {}
    options: dict[str, Any] = {"client": client, "environment": environment}

    def say(prompt: str) -> str:
        number = next(n for n, text in enumerate(asked) if text in prompt)
        return answers[number] if number == 0 else "no idea"

    if client == "train":
        options["renderer"] = str(chat_model)
    samples, _ = play(doors, chat_model, tmp_path, "gym_tasks", rows, say, **options)
    [right], [wrong] = samples
    assert (right.status, right.reward) == ("ok", 1.0), right.failure
    assert (wrong.status, wrong.reward < 1.0) == ("ok", True)


def test_gsm8k_compares_the_last_number(doors: Any, chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "gsm8k.jsonl"
    problem = {"question": "What is 1,000 + 200?", "answer": "Add them.\n#### 1,200"}
    file.write_text("".join(json.dumps(problem) + "\n" for _ in range(2)))
    rows = exported(tmp_path, "gsm8k_tasks", 2, {"file": str(file)})
    said = iter(["First 7, so it is 1200.", "1201"])
    samples, _ = play(doors, chat_model, tmp_path, "gsm8k_tasks", rows, lambda prompt: next(said))
    assert sorted(row.reward for [row] in samples) == [0.0, 1.0]


def test_a_row_without_a_task_is_named(doors: Any, chat_model: Path, tmp_path: Path) -> None:
    from megarl.common.errors import ToolFailed

    with pytest.raises(ToolFailed, match=r"the environment failed in sample 3:1: .*no object 'task_data'"):
        play(doors, chat_model, tmp_path, "sums_tasks", [{"prompt": "x"}], lambda prompt: "x")


def test_a_task_that_the_taskset_refuses_fails_its_sample_alone(doors: Any, chat_model: Path, tmp_path: Path) -> None:
    rows = [{"task_data": {"prompt": "x"}}]
    [[row]], _ = play(doors, chat_model, tmp_path, "sums_tasks", rows, lambda prompt: "x")
    assert row.status == "failed" and "total" in row.failure
