"""The format of tool calls, found in what a chat template writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.data.dialogue import DialogueError
from megarl.data.tool_calls import HERMES, BareFormat, TaggedFormat, ToolCall, ToolFormat
from megarl.data.tool_format import tool_format
from megarl.data.xml_calls import XmlFormat, learned
from tests.support.chat_templates import chat_tokenizer

GLM = XmlFormat(before_name="", after_name="", before_key="<arg_key>", before_value="</arg_key>\n<arg_value>",
                after_value="</arg_value>", closing="</tool_call>")  # fmt: skip


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", HERMES), ("llama3", BareFormat()), ("mistral", TaggedFormat("[TOOL_CALLS]", "")),
        ("qwen3_coder", XmlFormat()), ("qwen3_8", XmlFormat()), ("glm4_5", GLM),
        ("glm4_7", replace(GLM, before_value="</arg_key><arg_value>")),
        ("minimax_m2", XmlFormat("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">',
                                 "</parameter>", "</invoke>\n</minimax:tool_call>")),
    ],
)  # fmt: skip
def test_the_format_of_a_template_is_found(family: str, expected: ToolFormat) -> None:
    tokenizer = chat_tokenizer(family)
    found: Any = tool_format("template", tokenizer)
    assert found == expected
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": "a{}[]b"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, turn], tokenize=False)
    body = written[written.index('{"name"' if isinstance(found, BareFormat) else found.opening) :]
    body = body.partition(tokenizer.eos_token)[0]
    assert found.parse(body).calls == (ToolCall("f", {"x": "a{}[]b"}),)


def test_a_template_without_calls_is_refused_and_hermes_needs_none() -> None:
    tokenizer = chat_tokenizer("chatml")
    with pytest.raises(DialogueError, match=r"agent\.tool_format: hermes"):
        tool_format("template", tokenizer)
    assert tool_format("hermes", tokenizer) is HERMES


def test_tags_that_do_not_say_which_part_is_which_are_refused() -> None:
    """A call as Python writes it, and one whose tags tell the type of each value."""
    for call in ("'[' + f.name + '(' + f.arguments | tojson + ')]'", "f.name + '<a>' + f.arguments | string + '</a>'"):
        tokenizer = chat_tokenizer("chatml")
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
            "{{ " + call + " }}{% endif %}{% endfor %}"
        )
        with pytest.raises(DialogueError, match="neither as JSON nor as tags"):
            tool_format("template", tokenizer)
    typed = '<c><i n="{}"><p n="k" t="str">v</p><p n="l" t="int">7</p></i></c>'
    assert learned(typed.format("f"), "f", ("k", "v"), ("l", "7")) is None
