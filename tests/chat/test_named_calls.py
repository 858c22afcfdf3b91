"""Tool calls written as a name and JSON: what a template writes is read back, and what cannot be read is reported."""

import json
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.chat.named_calls import NamedFormat, learned_by_name
from megarl.chat.tool_calls import MalformedCall, ParsedTurn, ToolCall
from megarl.chat.tool_format import tool_format
from tests.support.models.chat_templates import ARGUMENTS_AS_TEXT, NAMED, chat_tokenizer

FORM = NamedFormat("<calls><call>", "<sep>", "</call><call>", "</call></calls>")
BARE = NamedFormat("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]")
ADD, ONE = '{"x": 1}', ToolCall("add", {"x": 1})

PIECES = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "```", "\n", "{", "}", '"', "é", "4", "<think>", "</think>"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.lists(st.sampled_from(PIECES)).map("".join)
VALUES = TEXTS | st.integers(-(2**63) + 1, 2**63 - 1) | st.booleans() | st.none() | st.lists(TEXTS, max_size=2)
CALLS = st.tuples(st.from_regex(r"[A-Za-z0-9_.\-]{1,20}", fullmatch=True), st.dictionaries(TEXTS, VALUES, max_size=3))


@cache
def of(family: str) -> tuple[Any, NamedFormat]:
    tokenizer = chat_tokenizer(family)
    found = tool_format("template", tokenizer)
    assert isinstance(found, NamedFormat)
    return tokenizer, found


@pytest.mark.parametrize("family", sorted(NAMED))
@given(made=st.lists(CALLS, min_size=1, max_size=3))
@settings(max_examples=60)
def test_the_calls_of_a_turn_are_read_back(family: str, made: list[tuple[str, Any]]) -> None:
    tokenizer, form = of(family)
    as_text = family in ARGUMENTS_AS_TEXT
    calls = [{"function": {"name": name, "arguments": json.dumps(v) if as_text else v}} for name, v in made]
    user = {"role": "user", "content": "x"}
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    text = tokenizer.apply_chat_template([user, turn], tokenize=False)[len(prompt) :].removesuffix("<|im_end|>\n")
    parsed = form.parse(f"I see. {text}")
    assert parsed.content == "I see." and repr(parsed.calls) == repr(tuple(ToolCall(*each) for each in made))


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (FORM, "No call.", ParsedTurn("No call.")),
        (FORM, f"a<calls><call>add<sep>{ADD}</call></calls>b", ParsedTurn("ab", (ONE,))),
        (FORM, f"<calls><call> add <sep>\n{ADD} </call>\n<call>add<sep>{ADD}</call> </calls>",
         ParsedTurn("", (ONE, ONE))),
        (FORM, f"<think><calls><call>add<sep>{ADD}</call></calls></think>b", None),
        (BARE, f"a[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]add[ARGS] {ADD} b", ParsedTurn("a b", (ONE, ONE))),
        (NamedFormat("<function=", ">", "", "</function>"), f"<function=add>{ADD}</function>", ParsedTurn("", (ONE,))),
    ],
)  # fmt: skip
def test_a_turn_is_read(form: NamedFormat, text: str, expected: ParsedTurn | None) -> None:
    """Without `expected` all is content."""
    assert form.parse(text) == (expected or ParsedTurn(text))


@pytest.mark.parametrize(
    ("form", "text", "reported"),
    [
        (FORM, f"<calls><call>{ADD}</call></calls>", "does not begin with the name of a tool and <sep>"),
        (FORM, "<calls><call>add<sep>print(4)</call></calls>", "its arguments are not JSON"),
        (FORM, '<calls><call>add<sep>{"x": NaN}</call></calls>', "NaN is not JSON"),
        (FORM, "<calls><call>add<sep>[1]</call></calls>", '"arguments" is not a JSON object'),
        (FORM, '<calls><call>add<sep>{"x": 1e999}</call></calls>', "a number in it is too large"),
        (FORM, f"<calls><call>add<sep>{ADD} and so on</call></calls>", "do not continue with </call></calls>"),
        (FORM, f"<calls><call>add<sep>{ADD}</call>", "</call></calls> is missing"),
        (FORM, "<calls><call>add", "</call></calls> is missing"),
        (BARE, "[TOOL_CALLS]add[ARGS]print(4)", "its arguments are not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_tells_why_and_the_next_one_is_read(
    form: NamedFormat, text: str, reported: str
) -> None:
    [call] = form.parse(text).calls
    assert isinstance(call, MalformedCall) and reported in call.error and len(call.error) < 700
    if form is FORM and text.endswith(form.closing):
        more = form.parse(f"a {text.replace('</call></calls>', f'</call><call>add<sep>{ADD}</call></calls>')} b")
        assert more.content.split() == ["a", "b"]
        assert [type(each) for each in more.calls] == [MalformedCall, ToolCall] and more.calls[1] == ONE
    if form is BARE:
        assert form.parse(f"{text}[TOOL_CALLS]add[ARGS]{ADD}").calls[1:] == (ONE,)


def test_certain_content_ends_before_a_call() -> None:
    assert FORM.certain_content("So. <calls><c") == "So." and FORM.certain_content("So. <calls> or") == "So. <calls> or"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("f<s>{}", "f<s>{}f<s>{}"),  # no mark before the name
        ("[f({})]", "[f({}), f({})]"),
        ("<a>f{}</a>", "<a>f{}</a><a>f{}</a>"),  # nothing between name and arguments
        ("<a>id<s>{}</a>", ""),  # the id in place of the name
        ("<a>f<s>id<t>{}</a>", ""),  # the id among the marks
        ("<a>f<s>(x=1)</a>", ""),
        ("<a>f<s>{}</a>", "<b>f<s>{}</a><b>f<s>{}</a>"),
        ("<a>f<s>{}</a>", "<a>f<s>{}</a><a>f<s>{}</a>!"),
        ("<a>f<s>{}", "<a>f<s>{} f<s>{}"),  # nothing between two calls
    ],
)
def test_a_form_in_which_parts_cannot_be_told_apart_is_not_learned(one: str, two: str) -> None:
    arguments = '{"x": 1}'
    one, two = one.replace("{}", arguments), two.replace("{}", arguments)
    assert learned_by_name(one, two, "f", {"x": 1}, "id") is None


def test_one_call_in_a_turn_is_learned_where_a_template_writes_no_more() -> None:
    expected = NamedFormat("<a>", "<s>", "", "</a>")
    for two in ("", '<a>f<s>{"x": 1}</a>'):
        assert learned_by_name('<a>f<s>{"x": 1}</a>', two, "f", {"x": 1}, "id") == expected


@pytest.mark.parametrize(
    "text",
    [
        "<calls><call>" * 20_000,
        "<calls><call>add<sep>" * 10_000 + "</call></calls>",
        "<calls><call>" + "f" * 200_000,
        "<calls><call>f" + " " * 200_000,
        "<calls><call>f<sep>" + "[" * 200_000,
        '<calls><call>f<sep>{"</call><call>' * 10_000,
        "<calls><call>f<sep>{}" + " " * 100_000 + "</call>" + " " * 100_000,
        "<calls><call>f<sep>0</call><call>" * 10_000,
    ],
)
def test_whatever_a_model_writes_is_read_in_a_moment(text: str) -> None:
    began = time.process_time()
    assert FORM.parse(text).calls
    assert time.process_time() - began < 2.0
