"""Streaming: the pieces together are the whole content, and nothing is sent that later tokens may change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.chat.tool_calls import HERMES, overlap
from megarl.chat.xml_calls import XmlFormat
from megarl.gateway.chat_route import cut_at, read_turn
from megarl.gateway.chats import TextStream

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
WORDS = st.lists(
    st.sampled_from(["a", "b ", "<", "<tool", "STOP", "ST", "é", " ", "\n", CALL, "<tool_call>"]), max_size=12
)


@given(WORDS, st.booleans(), st.booleans())
def test_the_pieces_are_the_content(words: list[str], tools: bool, stops: bool) -> None:
    text, stop, format_ = "".join(words), ["STOP"] if stops else [], HERMES if tools else None
    stream, sent = TextStream(stop, format_), []
    for end in range(len(text) + 1):
        sent.append(stream.piece(text[:end]))
        if cut_at(text[:end], stop)[1]:
            break
    turn = read_turn(cut_at(text, stop)[0], format_, [], "r")
    sent.append(stream.last_piece(turn))
    assert "".join(sent) == turn.content
    assert "STOP" not in turn.content or not stops


def test_an_unfinished_character_is_held_back() -> None:
    stream = TextStream([], None)
    assert [stream.piece(b"a\\ufffd".decode("unicode_escape")), stream.piece("aé")] == ["a", "é"]


@pytest.mark.parametrize(
    ("text", "stop", "size"), [("xST", "STOP", 2), ("STOP", "STOP", 0), ("SS", "STOP", 1), ("", "S", 0)]
)
def test_overlap(text: str, stop: str, size: int) -> None:
    assert overlap(text, stop) == size


def test_a_malformed_call_is_content() -> None:
    broken = "so: <tool_call>{oops</tool_call>"
    assert read_turn(broken, HERMES, [], "r").content == broken and read_turn(broken, HERMES, [], "r").calls == ()
    assert read_turn(f"so: {CALL}", HERMES, [], "r").content == "so:"
    assert read_turn(f"so: {CALL}", None, [], "r").content == f"so: {CALL}"


def test_the_arguments_of_a_tagged_call_have_the_types_that_the_request_declares() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    values = "".join(f"<parameter={key}>\n4\n</parameter>\n" for key in "xy")
    text = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    [call] = read_turn(text, XmlFormat(), tools, "r").calls
    assert call["function"] == {"name": "f", "arguments": '{"x": 4, "y": "4"}'}
    wrong = text.replace("4", "four")
    reported = read_turn(wrong, XmlFormat(), tools, "r")
    assert (reported.content, reported.calls, list(reported.requested[0])) == (wrong, (), ["error"])
