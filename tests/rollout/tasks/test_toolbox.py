"""The tools of data sets: made once, closed once, and refused with the key of the config."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.chat.dialogue import DialogueError
from megarl.chat.tool_calls import HERMES, BareFormat
from megarl.config.derived.datasets import train_sets
from megarl.config.schema.agent import ToolConfig
from megarl.rollout.tasks.toolbox import Toolboxes, make_tool
from tests.support.models.chat_templates import chat_tokenizer
from tests.support.trainer.configs import config as config_of

REAL_TIME = True  # tools have processes of their own

OBJECT = {"type": "object"}
DIGITS = {"kind": "examples.rl.agents.digits:Digits"}
CALCULATOR = {"kind": "examples.rl.tools.calculator:Calculator", "in_worker": True}


def boxes(family: str, **changes: Any) -> tuple[list[Any], Toolboxes]:
    config = config_of("model", **changes)
    made = Toolboxes(config.agent, chat_tokenizer(family), [2])
    return [made.of(each) for each in train_sets(config)], made


def test_a_single_turn_has_no_toolbox() -> None:
    assert boxes("qwen3")[0] == [None]


def test_sets_with_the_same_tool_share_it_and_it_is_closed_once() -> None:
    closed = []
    sets = [
        {"name": "a", "path": "a"}, {"name": "b", "path": "b", "tools": [{**DIGITS, "name": "count"}]},
        {"name": "c", "path": "c", "tools": []}, {"name": "d", "path": "d"},
    ]  # fmt: skip
    found, made = boxes("llama3", agent={"loop": "tool_agent"}, tools=[DIGITS, CALCULATOR], data={"sets": sets})
    assert [list(each.tools) for each in found] == [["digits", "calculator"], ["count"], [], ["digits", "calculator"]]
    assert found[0].tools["digits"] is found[3].tools["digits"] is not found[1].tools["count"]
    assert type(found[0].tools["calculator"]).__name__ == "Calculator"
    assert [schema["function"]["name"] for schema in found[1].schemas] == ["count"]
    assert [each.tool_format for each in found] == [BareFormat(), BareFormat(), HERMES, BareFormat()]

    def counting(close: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def counted() -> None:
            closed.append(1)
            await close()

        return counted

    for each in {id(tool): tool for box in found for tool in box.tools.values()}.values():
        each.close = counting(each.close)
    asyncio.run(made.close())
    asyncio.run(made.close())
    assert len(closed) == 3


def test_a_template_that_writes_no_calls_needs_the_name_of_the_format() -> None:
    agent = {"loop": "tool_agent"}
    tools = [CALCULATOR]
    with pytest.raises(DialogueError, match=r"set agent\.tool_format: hermes"):
        boxes("chatml", agent=agent, tools=tools)
    [found], _ = boxes("chatml", agent={**agent, "tool_format": "hermes"}, tools=tools)
    assert found.tool_format is HERMES


def test_functions_and_shipped_tools_are_made_under_their_names() -> None:
    function = make_tool(ToolConfig(kind="tests.support.agents.tool_functions:add", name="own"), "tools.0")
    http = ToolConfig(kind="http", name="far", kwargs={"url": "http://far:1", "description": "x", "parameters": OBJECT})
    remote = make_tool(http, "tools.1")
    computer = make_tool(ToolConfig(**CALCULATOR, name="compute"), "tools.2")
    assert [type(each).__name__ for each in (function, remote, computer)] == [
        "ProcessTool", "HttpTool", "Calculator"
    ]  # fmt: skip
    assert [each.name for each in (function, remote, computer)] == ["own", "far", "compute"]

    async def close() -> None:
        for each in (function, remote, computer):
            await each.close()

    asyncio.run(close())


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (
            "no_such_module:f",
            {},
            "tools.0: .* cannot be made: the tool .no_such_module:f. cannot be imported: ModuleNotFoundError",
        ),
        ("http", {"url": "http://far:1"}, "tools.0: 'http' cannot be made: .*name"),
        ("python", {"memory_mib": 1}, "tools.0: 'python' cannot be made: .*memory_mib"),
        ("python", {"colour": 1}, "tools.0: 'python' cannot be made: .*colour"),
        ("examples.rl.agents.digits:Digits", {"x": 1}, "tools.0: .* cannot be made"),
    ],
)
def test_a_tool_that_cannot_be_made_is_reported(kind: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tool(ToolConfig(kind=kind, kwargs=kwargs), "tools.0")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.support.agents.half_tools:NoSchema", "has no parameters, idempotent, async call, which a tool needs"),
        ("tests.support.agents.half_tools:FailsToStart", "its class failed with KeyError: 'server'"),
        ("tests.support.agents.half_tools:WrongSchema", "it is not a tool: parameters is wrong or missing"),
    ],
)
def test_a_class_that_is_no_tool_is_refused_with_its_key(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^tools\.0: .*{message}"):
        make_tool(ToolConfig(kind=path), "tools.0")


async def test_a_class_is_a_tool_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_SECRET", "s3")
    kwargs = {"path": str(tmp_path / "noted"), "secret": {"env": "TOOL_SECRET"}}
    tool = make_tool(
        ToolConfig(kind="tests.support.agents.tool_classes:Misbehaving", name="own", kwargs=kwargs), "tools.0"
    )
    assert tool.name == "own"
    answer = await tool.call({"how": "x"}, timeout_s=60.0)
    await tool.close()
    _, _, pid, secret = answer.text.split("|")
    assert int(pid) != os.getpid() and secret == "s3"


def test_a_class_stays_in_this_process_only_if_the_config_says_so(tmp_path: Path) -> None:
    kwargs = {"path": str(tmp_path / "noted")}
    kind = "tests.support.agents.tool_classes:Misbehaving"
    tool = make_tool(ToolConfig(kind=kind, name="own", kwargs=kwargs, in_worker=True), "tools.0")
    answer = asyncio.run(tool.call({"how": "x"}, timeout_s=60.0))
    assert tool.name == "own" and int(answer.text.split("|")[2]) == os.getpid()
    for other in ("python", "tests.support.agents.tool_functions:add"):
        with pytest.raises(ValueError, match=r"tools\.0: .*in_worker is for tools that are classes: remove it"):
            make_tool(ToolConfig(kind=other, in_worker=True), "tools.0")


def test_arguments_of_every_kind_may_be_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_URL", "http://far:1")
    monkeypatch.setenv("TOOL_TOKEN", "message")
    kwargs = {"url": {"env": "TOOL_URL"}, "description": "x", "parameters": OBJECT, "token": {"env": "TOOL_TOKEN"}}
    remote: Any = make_tool(ToolConfig(kind="http", name="far", kwargs=kwargs), "tools.0")
    assert str(remote._url) == "http://far:1"
    asyncio.run(remote.close())


def test_a_tool_that_does_not_close_keeps_no_other_open(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{**CALCULATOR, "name": name} for name in ("fails", "hangs", "works")]
    [box], made = boxes("llama3", agent={"loop": "tool_agent"}, tools=tools)
    closed = []

    async def fails() -> None:
        raise OSError("gone")

    async def hangs() -> None:
        await asyncio.Event().wait()

    async def works() -> None:
        closed.append("works")

    for name, close in {"fails": fails, "hangs": hangs, "works": works}.items():
        box.tools[name].close = close
    asyncio.run(made.close(0.05))
    assert closed == ["works"]
    assert "the tool fails did not close: OSError: gone" in caplog.text
    assert "the tool hangs did not close within 0 s" in caplog.text
