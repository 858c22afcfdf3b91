"""A user's function as a tool: its schema, its answers, and that its processes can be killed."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from pydantic import create_model

from megarl.tools.process_tool import ProcessTool, function_tool
from megarl.tools.process_worker import DescribedFunction, answer, describe, import_function
from megarl.tools.tool import MAX_IMAGE_BYTES, ToolAnswer
from tests.support.agents import tool_functions
from tests.support.models.tiny_vision import picture
from tests.support.rewards.sandboxes import processes_with
from tests.support.waiting import wait_until

PLACE = "tests.support.agents.tool_functions"
LONG_S = 120.0


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessTool]]:
    made: list[ProcessTool] = []

    def new(function: str, **more: object) -> ProcessTool:
        made.append(function_tool(f"{PLACE}:{function}", **more))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for each in made:
        asyncio.run(each.close())


def call(tool: ProcessTool, timeout_s: float = LONG_S, **arguments: object) -> ToolAnswer:
    return asyncio.run(tool.call(arguments, timeout_s=timeout_s))


def test_a_typed_function(make: Callable[..., ProcessTool]) -> None:
    tool = make("add")
    assert (tool.name, tool.description) == ("add", "Add two numbers.")
    assert tool.parameters["required"] == ["first"]
    assert {name: each["type"] for name, each in tool.parameters["properties"].items()} == {
        "first": "integer",
        "second": "integer",
    }
    assert call(tool, first=2, second=3) == ToolAnswer("5")
    assert call(tool, first=2) == ToolAnswer("3")


def test_arguments_of_the_wrong_type_are_told_to_the_model(make: Callable[..., ProcessTool]) -> None:
    tool = make("add")
    for wrong in ({}, {"first": "many"}, {"first": 1, "third": 1}, {"first": [1]}):
        answer = call(tool, **wrong)
        assert answer.error and answer.text.startswith("error: add: ")


def test_an_async_function_answers_json(make: Callable[..., ProcessTool]) -> None:
    assert call(make("slowly"), text="ü") == ToolAnswer('{"text": "ü"}')


def test_bound_arguments_are_not_shown(make: Callable[..., ProcessTool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_SECRET", "s3")
    tool = make("with_secret", kwargs={"secret": {"env": "TOOL_SECRET"}}, name="ask")
    assert tool.name == "ask" and list(tool.parameters["properties"]) == ["question"]
    assert call(tool, question="q") == ToolAnswer("q s3")
    with pytest.raises(ValueError, match="TOOL_MISSING is not set"):
        make("with_secret", kwargs={"secret": {"env": "TOOL_MISSING"}})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("untyped", "'first' has no type; write for example `first: str`"),
        ("without_docstring", "no docstring"),
        ("many", "a tool's arguments have names"),
        ("takes_object", "JSON cannot hold"),
        ("NOT_A_FUNCTION", "is a int, not a function"),
        ("nowhere", "has no attribute 'nowhere'"),
    ],
)
def test_what_is_no_tool_is_refused(function: str, message: str) -> None:
    path = f"{PLACE}:{function}"
    with pytest.raises(ValueError, match=message):
        describe(path, import_function(path), {})


def test_other_paths_are_refused(make: Callable[..., ProcessTool]) -> None:
    with pytest.raises(ValueError, match="'no_such_module_here:f' cannot be imported: ModuleNotFoundError"):
        import_function("no_such_module_here:f")
    with pytest.raises(ValueError, match="which its kwargs give"):
        describe("x:add", tool_functions.add, {"third": 1})
    with pytest.raises(ValueError, match="no docstring"):
        make("without_docstring")


def test_a_schema_of_richer_types() -> None:
    described = describe(f"{PLACE}:unit", tool_functions.unit, {})
    properties = described.parameters["properties"]
    assert properties["to"]["enum"] == ["m", "km"] and properties["tags"]["type"] == "array"
    assert described.checked({"value": 1, "to": "m", "tags": ["a"]}) == {"value": 1.0, "to": "m", "tags": ["a"]}
    with pytest.raises(ValueError, match="unit: to: "):
        described.checked({"value": 1, "to": "mile", "tags": []})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "SystemExit: 3"), ("raise", "ValueError: not today"), ("object", "TypeError"),
        ("memory", "MemoryError"), ("die", "exit code 4"),
    ],
)  # fmt: skip
def test_failures_are_errors_and_the_next_call_is_answered(
    make: Callable[..., ProcessTool], how: str, message: str
) -> None:
    tool = make("misbehave", memory_gib=1.5)
    answer = call(tool, how=how)
    assert answer.error and message in answer.text
    assert call(tool, how="answered").text.startswith("answered by")


def test_a_call_that_hangs_is_killed_with_what_it_started(make: Callable[..., ProcessTool]) -> None:
    tool = make("misbehave")
    assert call(tool, how="first").text.startswith("first by")
    answer = call(tool, timeout_s=2.0, how="child")
    assert answer.error and "did not answer in 2 s and was killed" in answer.text
    wait_until(lambda: not processes_with("left-by-a-tool"), LONG_S, "the end of the tool's child")
    assert call(tool, how="next").text.startswith("next by")


def test_a_process_is_reused_and_a_forked_child_answers_nothing(make: Callable[..., ProcessTool]) -> None:
    tool = make("misbehave")
    pids = {call(tool, how=how).text.rpartition(" ")[2] for how in ("one", "fork", "two", "three")}
    assert len(pids) == 1


def test_a_long_answer_is_cut(make: Callable[..., ProcessTool]) -> None:
    answer = call(make("misbehave", max_characters=500), how="long")
    assert len(answer.text) <= 500 and "left out" in answer.text


@pytest.mark.slow
async def test_calls_wait_for_a_process_only_within_their_time(make: Callable[..., ProcessTool]) -> None:
    tool = make("misbehave")
    first = asyncio.ensure_future(tool.call({"how": "hang"}, timeout_s=LONG_S))
    await asyncio.sleep(0)
    answer = await tool.call({"how": "x"}, timeout_s=0.5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert answer.error and "none of its 1 processes became free in 0.5 s" in answer.text
    answer = await tool.call({"how": "next"}, timeout_s=LONG_S)
    assert answer.text.startswith("next by"), "the cancelled call gave its process up"


@pytest.mark.parametrize("how", ["bytes", "url"])
def test_a_function_answers_with_chat_parts(how: str) -> None:
    tool = function_tool("tests.support.rollout.picture_agents:draw")
    try:
        shown = call(tool, seed=3, how=how)
    finally:
        asyncio.run(tool.close())
    assert shown == ToolAnswer("Before <image> and after.", images=(picture(90, 60, 3),))


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "image", "image": "a.png"}],
        [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
        [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}],
        [{"type": "image", "image": bytes(MAX_IMAGE_BYTES + 1)}],
        [{"type": "image", "image": bytes(MAX_IMAGE_BYTES // 2 + 1)}] * 2,
        [{"type": "video"}, {"type": "image", "image": b""}],
    ],
)
def test_parts_of_another_form_are_an_error_that_names_it(parts: list[dict[str, object]]) -> None:
    given = answer(DescribedFunction("f", "", create_model("f"), lambda: parts, {}), {}, 500)
    assert given["error"] and given["text"].startswith("error: ") and "images" not in given
