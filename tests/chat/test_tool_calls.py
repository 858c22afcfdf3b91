"""Tool calls read from the text of a turn: formats, malformed calls, and what of an unfinished turn is content."""

import json
import random

import pytest

from megarl.chat.tool_calls import HERMES, BareFormat, MalformedCall, ParsedTurn, TaggedFormat, ToolCall, ToolFormat

LLAMA = BareFormat()
MISTRAL = TaggedFormat("[TOOL_CALLS]", "")


def called(expression: str) -> ToolCall:
    return ToolCall("calculator", {"expression": expression})


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ADD = '{"name": "calculator", "arguments": {"expression": "2+2"}}'
AS_TEXT = json.dumps({"name": "f", "arguments": '{"x": 1}'})
LLAMA_ADD = ADD.replace("arguments", "parameters")
PERSON = '{"name": "Ada Lovelace", "born": 1815}'


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (HERMES, "The answer is 4.", ParsedTurn("The answer is 4.")),
        (HERMES, f"I compute.\n{hermes(ADD)}", ParsedTurn("I compute.", (called("2+2"),))),
        (HERMES, hermes(ADD) + "\n" + hermes(ADD.replace("2+2", "3")), ParsedTurn("", (called("2+2"), called("3")))),
        (HERMES, f"a{hermes(ADD)}b", ParsedTurn("ab", (called("2+2"),))),
        (HERMES, hermes(AS_TEXT), ParsedTurn("", (ToolCall("f", {"x": 1}),))),
        (HERMES, hermes('{"name": "f"}'), ParsedTurn("", (ToolCall("f", {}),))),
        (HERMES, f"<think>{hermes(ADD)}</think>No.", ParsedTurn(f"<think>{hermes(ADD)}</think>No.")),
        (HERMES, f"<think>a</think>\n{hermes(ADD)}", ParsedTurn("<think>a</think>", (called("2+2"),))),
        (HERMES, f"a</think>\n{hermes(ADD)}", ParsedTurn("a</think>", (called("2+2"),))),
        (HERMES, f"<think>never ended {hermes(ADD)}", ParsedTurn(f"<think>never ended {hermes(ADD)}")),
        (HERMES, hermes(ADD.replace("2+2", "</think>")), ParsedTurn("", (called("</think>"),))),
        (LLAMA, LLAMA_ADD, ParsedTurn("", (called("2+2"),))),
        (LLAMA, f"<|python_tag|>{LLAMA_ADD}", ParsedTurn("", (called("2+2"),))),
        (LLAMA, f"{LLAMA_ADD}; {LLAMA_ADD}", ParsedTurn("", (called("2+2"), called("2+2")))),
        (LLAMA, '{"answer": 4}', ParsedTurn('{"answer": 4}')),
        (LLAMA, "The answer is {4}.", ParsedTurn("The answer is {4}.")),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}, {ADD}]", ParsedTurn("", (called("2+2"), called("2+2")))),
        (HERMES, hermes(ADD.replace("2+2", "</tool_call>")) + " b", ParsedTurn("b", (called("</tool_call>"),))),
        (HERMES, hermes(LLAMA_ADD), ParsedTurn("", (called("2+2"),))),  # the other form's key
        (LLAMA, ADD, ParsedTurn("", (called("2+2"),))),
        (LLAMA, f"{LLAMA_ADD}\n\nShall I go on?", ParsedTurn("Shall I go on?", (called("2+2"),))),
        (LLAMA, f"<|python_tag|>{LLAMA_ADD} Done.", ParsedTurn("Done.", (called("2+2"),))),
        (LLAMA, f"[{LLAMA_ADD}]", ParsedTurn("", (called("2+2"),))),
        (LLAMA, f'{{"type": "function", "function": {LLAMA_ADD}}}', ParsedTurn("", (called("2+2"),))),
        (LLAMA, "[1, 2]", ParsedTurn("[1, 2]")),
        (LLAMA, f"{LLAMA_ADD}, {LLAMA_ADD}", ParsedTurn("", (called("2+2"), called("2+2")))),
        (HERMES, hermes(f'{ADD[:-1]}, "parameters": {{}}}}'), ParsedTurn("", (called("2+2"),))),
        (LLAMA, f'{ADD[:-1]}, "parameters": null}}', ParsedTurn("", (called("2+2"),))),
        (LLAMA, PERSON, ParsedTurn(PERSON)),  # an answer that has a name
        (MISTRAL, f"Well.[TOOL_CALLS] [{ADD}] after", ParsedTurn("Well. after", (called("2+2"),))),
    ],
)  # fmt: skip
def test_a_turn_is_read(kind: ToolFormat, text: str, expected: ParsedTurn) -> None:
    assert kind.parse(text) == expected


@pytest.mark.parametrize("arguments", ["null", '""', '"null"', "{}", '"{}"'])
def test_a_call_may_have_no_arguments(arguments: str) -> None:
    found = HERMES.parse(hermes(f'{{"name": "now", "arguments": {arguments}}}'))
    assert found == ParsedTurn("", (ToolCall("now", {}),))


def test_an_object_that_names_a_tool_is_a_call_without_arguments() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert LLAMA.parse('{"name": "now"}', tools) == ParsedTurn("", (ToolCall("now", {}),))
    assert LLAMA.parse('{"name": "now"}') == ParsedTurn('{"name": "now"}')


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (HERMES, hermes('{"name": "f", "arguments": {'), "it is not JSON"),
        (HERMES, hermes("[" * 100_000), "it is not JSON"),
        (HERMES, hermes('{"name": "f", "arguments": {"x": NaN}}'), "it is not JSON.*NaN"),
        (HERMES, hermes("4"), "it is not a JSON object"),
        (HERMES, hermes('{"name": "f", "args": {"x": 1}}'), 'it has "args" instead of "arguments"'),
        (LLAMA, '{"name": "f", "parameters": {"x": 1', "it is not JSON"),
        (HERMES, hermes("[]"), "it is not a JSON object"),
        (HERMES, hermes('{"arguments": {}}'), 'it has no "name"'),
        (HERMES, hermes('{"name": 4, "arguments": {}}'), 'it has no "name"'),
        (HERMES, hermes('{"name": "f", "arguments": [1]}'), '"arguments" is not a JSON object'),
        (HERMES, hermes('{"name": "f", "arguments": "x"}'), '"arguments" is not a JSON object'),
        (HERMES, hermes('{"name": "f", "arguments": {"x": "\\ud800"}}'), "half of a surrogate pair"),
        (HERMES, hermes('{"name": "\\ud800", "arguments": {}}'), "half of a surrogate pair"),
        (HERMES, hermes('{"name": "f", "arguments": {"x": 1e999}}'), "a number in it is too large"),
        (HERMES, hermes('{"name": "f", "arguments": {"x": [-9223372036854775809]}}'), "a number in it is too large"),
        (HERMES, hermes('{"name": "f", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}"), "nested more than 64"),
        (HERMES, "<tool_call>\n" + ADD, "</tool_call> is missing"),
        (LLAMA, "<|python_tag|>print(4)", "it is not JSON"),
        (HERMES, hermes(f'{ADD[:-1]}, "parameters": {{"expression": "3"}}}}'), 'both "arguments" and "parameters"'),
        (LLAMA, '{"name": "calculator", "parameters": ', "it is not JSON"),
        (MISTRAL, "[TOOL_CALLS] 2+2", "it is not a JSON object"),
    ],
)
def test_a_malformed_call_tells_the_model_what_is_wrong(kind: ToolFormat, text: str, message: str) -> None:
    (call,) = kind.parse(text).calls
    assert isinstance(call, MalformedCall)
    with pytest.raises(ValueError, match=f"^the tool call cannot be read: .*{message}"):
        raise ValueError(call.error)
    assert len(call.error) < 700  # whatever the model wrote


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", ADD, LLAMA_ADD, "[TOOL_CALLS]", "<|python_tag|>",
          " ", "\n", "text", "<tool", "{", "[", "}", ";"]  # fmt: skip


@pytest.mark.parametrize("kind", [HERMES, LLAMA, MISTRAL, BareFormat(opening="")])
def test_certain_content_is_a_beginning_of_the_content_and_grows(kind: ToolFormat) -> None:
    rng, seen = random.Random(3), 0
    for _ in range(600):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 8)))
        whole, before = kind.parse(text).content, ""
        for end in range(len(text) + 1):
            certain = kind.certain_content(text[:end])
            assert whole.startswith(certain), text[:end]
            assert certain.startswith(before), text[:end]
            before = certain
            seen += bool(certain)
    assert seen


def test_content_is_reported_as_soon_as_no_call_can_begin_with_it() -> None:
    assert HERMES.certain_content("The answer <tool") == "The answer"
    assert HERMES.certain_content("The answer <tools") == "The answer <tools"
    assert LLAMA.certain_content("The") == "The" and LLAMA.certain_content('{"na') == ""
