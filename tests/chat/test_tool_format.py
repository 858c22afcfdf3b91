"""The format of tool calls, found in what a chat template writes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from megarl.chat.dialogue import DialogueError
from megarl.chat.named_calls import NamedFormat
from megarl.chat.tool_calls import HERMES, BareFormat, TaggedFormat, ToolCall, ToolFormat
from megarl.chat.tool_format import NoCallsWritten, tool_format
from megarl.chat.xml_calls import XmlFormat, learned
from tests.support.models.chat_templates import ARGUMENTS_AS_TEXT, chat_tokenizer

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
        ("deepseek_v3", NamedFormat(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```json",
            "```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
        ("deepseek_v3_1", NamedFormat(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>")),
    ],
)  # fmt: skip
def test_the_format_of_a_template_is_found(family: str, expected: ToolFormat) -> None:
    tokenizer = chat_tokenizer(family)
    found: Any = tool_format("template", tokenizer)
    assert found == expected
    arguments: Any = {"x": "a{}[]b"}
    if family in ARGUMENTS_AS_TEXT:
        arguments = json.dumps(arguments)
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    written = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, turn], tokenize=False)
    body = written[written.index('{"name"' if isinstance(found, BareFormat) else found.opening) :]
    body = body.partition(tokenizer.eos_token)[0]
    assert found.parse(body).calls == (ToolCall("f", {"x": "a{}[]b"}),)


def test_a_template_without_calls_is_refused_and_hermes_needs_none() -> None:
    tokenizer = chat_tokenizer("chatml")
    with pytest.raises(NoCallsWritten, match=r"agent\.tool_format: hermes"):
        tool_format("template", tokenizer)
    assert tool_format("hermes", tokenizer) is HERMES


def writing(call: str, where: str = "m.tool_calls", content: str = "m.content") -> Any:
    """Return a tokenizer whose template writes the expression `call` of the call's function `f`."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ " + content + " }}{% if " + where + " %}{% set f = m.tool_calls[0].function %}"
        "{{ " + call + " }}{% endif %}{% endfor %}"
    )
    return tokenizer


def test_a_call_that_a_template_writes_only_without_content_is_found() -> None:
    call = "'<t>' + f.name + '<s>' + f.arguments + '</t>'"
    tokenizer = writing(call, "m.tool_calls and m.content is none", "m.content or ''")
    assert tool_format("template", tokenizer) == NamedFormat("<t>", "<s>", "", "</t>")


def test_what_a_template_writes_of_an_object_is_not_overruled_by_a_text() -> None:
    """Arguments in a form of its own, and those that are a text as they are."""
    tokenizer = writing("'<t>' + f.name + '<s>' + (f.arguments if f.arguments is string else 'k:v') + '</t>'")
    with pytest.raises(DialogueError, match="in an unknown form"):
        tool_format("template", tokenizer)


def test_a_template_that_refuses_calls_is_none_that_writes_no_calls() -> None:
    with pytest.raises(DialogueError, match="refuses a tool call: no tools here") as refusal:
        tool_format("template", writing("raise_exception('no tools here')"))
    assert not isinstance(refusal.value, NoCallsWritten)


def test_tags_that_do_not_say_which_part_is_which_are_refused() -> None:
    """A call as Python writes it, and one whose tags tell the type of each value."""
    for call in ("'[' + f.name + '(' + f.arguments | tojson + ')]'", "f.name + '<a>' + f.arguments | string + '</a>'"):
        with pytest.raises(DialogueError, match="in an unknown form"):
            tool_format("template", writing(call))
    typed = '<c><i n="{}"><p n="k" t="str">v</p><p n="l" t="int">7</p></i></c>'
    assert learned(typed.format("f"), "f", ("k", "v"), ("l", "7")) is None
