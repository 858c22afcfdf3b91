"""The format of tool calls, found in what a chat template writes."""

from __future__ import annotations

import pytest

from megarl.data.dialogue import DialogueError
from megarl.data.tool_calls import HERMES, BareFormat, TaggedFormat, ToolCall, ToolFormat
from megarl.data.tool_format import tool_format
from tests.support.chat_templates import chat_tokenizer


@pytest.mark.parametrize(
    ("family", "expected"),
    [("qwen3", HERMES), ("llama3", BareFormat()), ("mistral", TaggedFormat("[TOOL_CALLS]", ""))],
)
def test_the_format_of_a_template_is_found(family: str, expected: ToolFormat) -> None:
    tokenizer = chat_tokenizer(family)
    found = tool_format("template", tokenizer)
    assert found == expected
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": "a{}[]b"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, turn], tokenize=False)
    body = written[written.index(found.opening if isinstance(found, TaggedFormat) else '{"name"') :]
    body = body.partition(tokenizer.eos_token)[0]
    assert found.parse(body).calls == (ToolCall("f", {"x": "a{}[]b"}),)


def test_a_template_without_calls_is_refused_and_hermes_needs_none() -> None:
    tokenizer = chat_tokenizer("chatml")
    with pytest.raises(DialogueError, match=r"agent\.tool_format: hermes"):
        tool_format("template", tokenizer)
    assert tool_format("hermes", tokenizer) is HERMES
