"""Environments and programs that verifiers 0.4 ships itself, unchanged, over the gateway with a stand-in engine.

Its packages have neither GSM8K nor reasoning-gym: `test_verifiers_environments.py` has tasksets for these. Its program
`null` chats, and calls tools by MCP; uv installs it when it first runs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.tokenize import load_tokenizer
from tests.support.gateway.verifiers_play import exported, needs_verifiers, play

pytestmark = needs_verifiers
NULL: dict[str, Any] = {"harness": {"id": "null"}}


@pytest.mark.parametrize("client", ["eval", "train"])
def test_a_single_turn(gateways: Any, chat_model: Path, tmp_path: Path, client: Any) -> None:
    rows = exported(tmp_path, "echo_v1", 2, {"phrases": ["one thing", "another"]})
    options: dict[str, Any] = {"client": client, "environment": {"agent": NULL}}
    if client == "train":
        options |= {"renderer": str(chat_model), "renderer_config": {"name": "default"}}

    def say(prompt: str) -> str:
        return "One thing!" if "one thing" in prompt else "no idea"

    samples, gateway = play(gateways, chat_model, tmp_path, "echo_v1", rows, say, **options)
    [right], [wrong] = samples
    assert (right.status, right.reward, right.reward_components) == ("ok", 1.0, {"echoed": 1.0}), right.failure
    assert (wrong.status, wrong.reward) == ("ok", 0.0), wrong.failure
    assert all(right.response_mask) and load_tokenizer(chat_model).decode(right.response_ids) == "One thing!<|im_end|>"
    assert gateway.call(lambda parts: len(parts.sessions)) == 0


def test_a_tool_over_mcp(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    """The tool counts its calls in the state of its sample, and the reward asks for two of them."""
    rows = exported(tmp_path, "counter_tool_v1", 1)
    call = f"<tool_call>\n{json.dumps({'name': 'counter_bump', 'arguments': {}})}\n</tool_call>"

    def say(prompt: str) -> str:
        return "<answer>done</answer>" if "count=3" in prompt else call

    samples, _ = play(gateways, chat_model, tmp_path, "counter_tool_v1", rows, say, environment={"agent": NULL})
    tokenizer, [[row]] = load_tokenizer(chat_model), samples
    assert (row.status, row.reward, row.reward_components["counted"]) == ("ok", 1.0, 1.0), row.failure
    inserted = tokenizer.decode([t for t, m in zip(row.response_ids, row.response_mask, strict=True) if not m])
    assert re.findall(r"count=\d", inserted) == ["count=1", "count=2", "count=3"]
    made = tokenizer.decode([t for t, m in zip(row.response_ids, row.response_mask, strict=True) if m])
    assert made.count("counter_bump") == 3


def test_a_game_of_textarena(gateways: Any, chat_model: Path, tmp_path: Path) -> None:
    """The engine of the game is the user, and the role of the model is not called `agent`."""
    words = tmp_path / "nltk/corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("banana\n")
    variables = {"NLTK_DATA": str(tmp_path / "nltk")}
    config = {"game": "Hangman-v0"}
    rows = exported(tmp_path, "textarena", 2, config, variables=variables)

    def say(prompt: str) -> str:
        return "[banana]" if "guess" in prompt.rpartition("<|im_start|>user")[2] and "[B]" in prompt else "[B]"

    options = {"taskset_config": config, "environment": {"player": NULL}, "variables": variables}
    samples, _ = play(gateways, chat_model, tmp_path, "textarena", rows, say, **options)
    for [row] in samples:
        assert (row.status, row.reward) == ("ok", 1.0), row.failure
        assert 0 < sum(row.response_mask) < len(row.response_mask)
