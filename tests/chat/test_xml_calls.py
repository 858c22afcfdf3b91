"""Tool calls written as tags: what a template writes is read back as the same call; what is unreadable is reported."""

import re
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.chat.tool_calls import MalformedCall, ParsedTurn, ToolCall
from megarl.chat.tool_format import tool_format
from megarl.chat.xml_calls import XmlFormat
from tests.support.models.chat_templates import TAGGED, chat_tokenizer

FORM = XmlFormat()


def tool(name: str = "f", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "$defs": {"Colour": {"enum": ["red", 3]}}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def written(name: str = "f", **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# --- what a template writes is read back

PIECES = ["<tool_call>", "</tool_call>", "</parameter>", "<parameter=x>", "</function>", "</arg_value>", "<arg_key>",
          "<think>", "</think>", "\n", " ", "4", "null", "true", "é", '"']  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.lists(st.sampled_from(PIECES)).map("".join)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
NUMBERS = INTEGERS | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6,
)  # fmt: skip
BY_TYPE = {
    "string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": st.booleans(), "null": st.none(),
    "array": st.lists(JSON, max_size=3), "object": st.dictionaries(TEXTS, JSON, max_size=3),
}  # fmt: skip
NAMES = st.from_regex(r"[A-Za-z0-9_.\-]{1,20}", fullmatch=True)


@st.composite
def arguments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (schemas of properties, values of such types)."""
    properties, values = {}, {}
    for key in draw(st.lists(NAMES, max_size=3, unique=True)):
        kind = draw(st.sampled_from(sorted(BY_TYPE)))
        null = draw(st.booleans()) and kind != "string"  # "null" of such a type means nothing
        properties[key] = {"anyOf": [{"type": kind}, {"type": "null"}]} if null else {"type": kind}
        values[key] = draw(BY_TYPE[kind] | st.none() if null else BY_TYPE[kind])
    return properties, values


@cache
def of(family: str) -> tuple[Any, XmlFormat]:
    tokenizer = chat_tokenizer(family)
    found = tool_format("template", tokenizer)
    assert isinstance(found, XmlFormat)
    return tokenizer, found


def same(one: object, other: object) -> bool:
    """Equal with equal types: 1, 1.0 and True are three values."""
    return repr(one) == repr(other)


@pytest.mark.parametrize("family", sorted(TAGGED))
@given(made=st.lists(st.tuples(NAMES, arguments()), min_size=1, max_size=3, unique_by=lambda each: each[0]))
@settings(max_examples=60)
def test_the_calls_of_a_turn_are_read_back(family: str, made: list[tuple[str, Any]]) -> None:
    tokenizer, form = of(family)
    schemas = [tool(name, **properties) for name, (properties, _) in made]
    calls = [{"function": {"name": name, "arguments": values}} for name, (_, values) in made]
    user = {"role": "user", "content": "x"}
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = tokenizer.apply_chat_template([user, turn], tokenize=False)[len(prompt) :].removesuffix("<|im_end|>\n")
    for _, (_, values) in made:  # no reader can tell where such a value ends
        end = rf"{re.escape(form.after_value.strip())}\s*({re.escape(form.before_key)}|{form.closing.split()[0]})"
        assume(not any(re.search(end, str(value)) for value in values.values()))
    parsed = form.parse(text, schemas)
    expected = tuple(ToolCall(name, values) for name, (_, values) in made)
    assert parsed.content == "" and same(parsed.calls, expected)


# --- types


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ({"type": "string"}, "4", "4"),
        ({"type": "string"}, " a\n b ", " a\n b "),
        ({}, "4", "4"),
        ({"type": "integer"}, " 4 ", 4),
        ({"type": "integer"}, "4.0", 4),
        ({"type": "number"}, "1e-05", 1e-05),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, {}]", [1, {}]),
        ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1, {", "[1, {"),
        ({"$ref": "#/$defs/Colour"}, "red", "red"),
        ({"$ref": "#/$defs/Colour"}, "3", 3),
        ({"$ref": "#/$defs/None"}, "3", "3"),
        ({"const": True}, "true", True),
        ({"allOf": [{"$ref": "#"}, {"type": "integer"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, '{"a": NaN}', None),
        ({"type": "integer"}, "4.5", None),
        ({"type": "integer"}, "true", None),
        ({"type": "number"}, "inf", None),
        ({"type": "boolean"}, "1", None),
        ({"type": "array"}, "{}", None),
        ({"type": "object"}, "[" * 100_000, None),
        ({"type": "integer"}, "9" * 5000, None),
    ],
)
def test_a_value_is_read_by_its_declared_type(declared: dict[str, Any], text: str, value: object) -> None:
    """`value` None where null is not allowed: the text is of no declared type."""
    [call] = FORM.parse(written(x=text), [tool(x=declared)]).calls
    if value is None and "null" not in declared.get("type", ""):
        assert isinstance(call, MalformedCall) and f"'x' must be of the type {declared['type']}" in call.error
    else:
        assert isinstance(call, ToolCall) and same(call.arguments, {"x": value})


def test_an_unknown_tool_has_texts_for_arguments_and_others_may_be_declared_at_once() -> None:
    assert FORM.parse(written("g", x="4"), [tool(x={"type": "integer"})]).calls == (ToolCall("g", {"x": "4"}),)
    others = {"function": {"name": "f", "parameters": {"additionalProperties": {"type": "integer"}}}}
    assert FORM.parse(written(x="4"), [others]).calls == (ToolCall("f", {"x": 4}),)


# --- what is no call


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("<tool_call>\n</tool_call>", "it does not begin with the name of a tool"),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "it does not begin with the name of a tool"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "it does not begin with the name"),
        ("<tool_call><function=f><parameter=x>1</function></tool_call>", "'x' has no </parameter>"),
        (
            "<tool_call><function=f>oops</function></tool_call>",
            "does not continue with <parameter= or </function></tool",
        ),
        ("<tool_call><function=f><parameter=x>1</parameter>and</function></tool_call>", "'x' has no </parameter>"),
        (written(x="1", y="2").replace("=y", "=x"), "two arguments 'x'"),
        (written(x="1").removesuffix("</tool_call>"), "</tool_call> is missing"),
        (written(x="1")[:40], "</tool_call> is missing"),
        (written(x="four"), "'x' must be of the type integer"),
        (written(x="9223372036854775808"), "a number in it is too large"),
    ],
)
def test_a_call_that_cannot_be_read_tells_why_and_the_next_one_is_read(text: str, reported: str) -> None:
    schemas = [tool(x={"type": "integer"})]
    [call] = FORM.parse(text, schemas).calls
    assert isinstance(call, MalformedCall) and reported in call.error and len(call.error) < 700
    # A value without its end goes on to the next one's end: it might hold a call as its text.
    if text.endswith("</tool_call>") and "has no </parameter>" not in reported:
        more = FORM.parse(f"a {text}\n{written(x='2')} b", schemas)
        assert more.content.split() == ["a", "b"] and more.calls == (call, ToolCall("f", {"x": 2}))


def test_a_model_may_leave_out_white_space_and_a_thought_holds_no_call() -> None:
    schemas = [tool(x={"type": "integer"})]
    bare = written(x="2").replace("\n", "")
    assert FORM.parse(bare, schemas).calls == (ToolCall("f", {"x": 2}),)
    assert FORM.parse(f"<think>{bare}</think>No.", schemas) == ParsedTurn(f"<think>{bare}</think>No.")
    assert FORM.certain_content("So. <tool_c") == "So." and FORM.certain_content(f"So.\n{bare[:30]}") == "So."


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        "<tool_call><function=f><parameter=x>" * 5_000,
        "<tool_call><function=f><parameter=" + "a " * 100_000,
        "<tool_call><function=f><parameter=a" + " " * 200_000,
        "<tool_call><function=" + "f" * 200_000,
        "<tool_call><function=f><parameter=x>" + "</parameter>" * 20_000,
        "<tool_call><function=f><parameter=x>" + "</parameter>\n</function>\n\n\n" * 10_000,
    ],
)
def test_whatever_a_model_writes_is_read_in_a_moment(text: str) -> None:
    began = time.process_time()
    assert FORM.parse(text).calls
    assert time.process_time() - began < 2.0
