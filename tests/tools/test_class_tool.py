"""A user's class as a tool: one object in a process that is killed when it hangs, forks or dies, and started again."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.common.process.child_process import StartError
from megarl.tools import process_tool
from megarl.tools.process_tool import ProcessTool, ToolRaisedError, class_tool
from megarl.tools.tool import ToolAnswer
from tests.support.models.tiny_vision import picture
from tests.support.rewards.sandboxes import processes_with
from tests.support.waiting import wait_until

PLACE = "tests.support.agents.tool_classes"
LONG_S = 120.0


class Made:
    """Tools that are closed at the end, and the file in which their calls are noted."""

    def __init__(self, path: Path) -> None:
        self.path, self.tools = path, list[ProcessTool]()

    def __call__(self, name: str = "Misbehaving", **kwargs: Any) -> ProcessTool:
        self.tools.append(class_tool(f"{PLACE}:{name}", kwargs={"path": str(self.path), **kwargs}))
        return self.tools[-1]

    def noted(self) -> list[str]:
        return self.path.read_text().splitlines()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path / "noted")
    yield made
    for each in made.tools:
        asyncio.run(each.close())


def call(tool: ProcessTool, how: str, timeout_s: float = LONG_S) -> ToolAnswer:
    return asyncio.run(tool.call({"how": how}, timeout_s=timeout_s))


def pid_of(answer: ToolAnswer) -> int:
    assert not answer.error, answer
    return int(answer.text.split("|")[2])


def test_one_object_in_another_process_answers_all_calls(make: Made) -> None:
    tool = make(secret="s3")
    assert (tool.name, tool.description, tool.idempotent) == ("misbehaving", "Misbehave.", False)
    assert tool.parameters["type"] == "object"
    first, second = call(tool, "one"), call(tool, "two")
    assert first.text.startswith("one|1|") and second.text.startswith("two|2|")
    assert pid_of(first) == pid_of(second) != os.getpid() and second.text.endswith("|s3")
    assert call(tool, "error") == ToolAnswer("your mistake", error=True)
    assert len(call(tool, "long").text) <= 1_000_000


async def test_calls_run_at_once(make: Made) -> None:
    tool = make()
    answers = await asyncio.gather(*(tool.call({"how": "slow"}, timeout_s=LONG_S) for _ in range(200)))
    assert len({pid_of(each) for each in answers}) == 1 and len(answers) == 200
    assert make.noted().index("slow ended") > 10, "they wait for each other"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "child", "deaf"])
def test_a_call_that_hangs_is_killed_with_all_that_it_started(make: Made, how: str) -> None:
    tool = make()
    first = pid_of(call(tool, "first"))
    answer = call(tool, how, timeout_s=2.0)
    assert answer == ToolAnswer("error: misbehaving: it did not answer in 2 s and was killed", error=True)
    assert not psutil.pid_exists(first)
    wait_until(lambda: not processes_with("left-by-a-class"), LONG_S, "the end of the tool's child")
    following = call(tool, "next")
    assert following.text.startswith("next|1|") and pid_of(following) != first  # a new object


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wait", "thread"])
def test_a_call_that_can_be_cancelled_ends_its_process_when_the_other_calls_have_ended(make: Made, how: str) -> None:
    """A thread or a program that it has started goes on, so the process must not."""
    tool = make()
    first = pid_of(call(tool, "first"))

    async def two() -> tuple[ToolAnswer, ToolAnswer, ToolAnswer]:
        late = asyncio.ensure_future(tool.call({"how": how}, timeout_s=1.0))
        await asyncio.sleep(0.5)
        other = asyncio.ensure_future(tool.call({"how": "slow"}, timeout_s=LONG_S))
        answer = await late
        following = await tool.call({"how": "next"}, timeout_s=LONG_S)
        return answer, await other, following

    late, other, following = asyncio.run(two())
    assert late == ToolAnswer("error: misbehaving: it did not answer in 1 s", error=True)
    assert pid_of(other) == first != pid_of(following)
    wait_until(lambda: not psutil.pid_exists(first), LONG_S, "the end of the process")
    wait_until(lambda: not processes_with("left-by-a-class"), LONG_S, "the end of the tool's child")


@pytest.mark.parametrize(
    ("how", "message"),
    [("die", "exit code 4"), ("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")],
)
def test_a_process_that_dies_is_an_error_and_the_next_call_has_another(make: Made, how: str, message: str) -> None:
    tool = make()
    answer = call(tool, how)
    assert answer == ToolAnswer(f"error: misbehaving: its process ended during the call: {message}", error=True)
    assert make.noted() == [how]  # it is not idempotent
    assert call(tool, "next").text.startswith("next|1|")


@pytest.mark.parametrize("how", ["fork", "fork and wait"])
def test_a_forked_child_answers_nothing_and_takes_no_calls(make: Made, how: str) -> None:
    tool = make()
    pids = set()
    for _ in range(5):
        pids |= {pid_of(call(tool, how)), pid_of(call(tool, "one"))}
    assert len(pids) == 1
    assert make.noted() == [how, "one"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_call_whose_process_is_killed_for_another_one_is_repeated_if_it_may_be(make: Made, idempotent: bool) -> None:
    tool = make(idempotent=idempotent)

    async def two() -> tuple[ToolAnswer, ToolAnswer]:
        other = asyncio.ensure_future(tool.call({"how": "slow"}, timeout_s=LONG_S))
        while "slow" not in (make.noted() if make.path.exists() else ()):
            await asyncio.sleep(0.01)
        return await tool.call({"how": "block"}, timeout_s=0.05), await other

    blocked, other = asyncio.run(two())
    assert blocked.error
    assert make.noted().count("slow") == (2 if idempotent else 1)
    if idempotent:
        assert other.text.startswith("slow|1|")
    else:
        assert other.error and "killed, because another call of it did not end in time" in other.text


def test_a_call_that_kills_its_process_is_repeated_only_once(make: Made) -> None:
    assert "exit code 4" in call(make(idempotent=True), "die").text
    assert make.noted() == ["die", "die"]


@pytest.mark.parametrize(
    ("how", "message"), [("raise", "ValueError: not today"), ("text", "must return a ToolAnswer, not str")]
)
def test_a_mistake_in_the_class_is_raised(make: Made, how: str, message: str) -> None:
    tool = make()
    with pytest.raises(ToolRaisedError, match=message):
        call(tool, how)
    assert call(tool, "next").text.startswith("next|2|")


def test_a_call_that_is_given_up_ends_in_the_process_too(make: Made) -> None:
    tool = make()

    async def give_up() -> None:
        running = asyncio.ensure_future(tool.call({"how": "thread"}, timeout_s=LONG_S))
        while not processes_with("left-by-a-class"):
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(give_up())
    assert call(tool, "next").text.startswith("next|2|")
    asyncio.run(tool.close())
    wait_until(lambda: not processes_with("left-by-a-class"), LONG_S, "the end of the tool's child")


def test_a_closed_tool_has_closed_its_object_and_has_no_processes(make: Made) -> None:
    before = {each.pid for each in psutil.Process(os.getpid()).children(recursive=True)}
    tool = make()
    call(tool, "x")
    asyncio.run(tool.close())
    asyncio.run(tool.close())
    assert make.noted() == ["x", "closed"]
    assert not {each.pid for each in psutil.Process(os.getpid()).children(recursive=True)} - before
    assert call(tool, "x") == ToolAnswer("error: misbehaving: it is closed", error=True)


async def test_calls_that_are_open_when_the_tool_is_closed_end(make: Made) -> None:
    tool = make(idempotent=True)  # which must not begin again
    running = asyncio.ensure_future(tool.call({"how": "wait"}, timeout_s=LONG_S))
    while not make.path.exists():
        await asyncio.sleep(0.01)
    await tool.close()
    answer = await running
    assert answer.error and "closed" in answer.text
    assert make.noted() == ["wait", "closed"]


def test_an_object_that_fails_to_close_is_reported_and_one_that_hangs_is_killed(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tool, "CLOSE_S", 0.5)
    fails, hangs = make("FailsToClose"), make("NeverCloses")
    pids = [pid_of(call(each, "x")) for each in (fails, hangs)]
    with pytest.raises(ToolRaisedError, match="OSError: gone"):
        asyncio.run(fails.close())
    asyncio.run(hangs.close())
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("DiesAtStart", StartError, "ended at its start: exit code 7"),
        ("HangsAtStart", TimeoutError, "was not ready after 3 s"),
        ("Misbehaving", ValueError, "its class failed with TypeError: .*path"),
        ("NoSuchClass", ValueError, "its class failed with AttributeError"),
    ],
)
def test_a_class_that_cannot_be_made(name: str, kind: type[Exception], message: str) -> None:
    before = {each.pid for each in psutil.Process(os.getpid()).children(recursive=True)}
    with pytest.raises(kind, match=message):
        class_tool(f"{PLACE}:{name}", start_timeout_s=3.0 if kind is TimeoutError else LONG_S)
    assert not {each.pid for each in psutil.Process(os.getpid()).children(recursive=True)} - before


async def test_it_works_in_any_event_loop_and_thread(make: Made) -> None:
    tool = make()
    answers: list[ToolAnswer] = []
    work: Callable[[], None] = lambda: answers.append(call(tool, "there"))  # noqa: E731
    await asyncio.gather(asyncio.to_thread(work), asyncio.to_thread(work))
    assert len({pid_of(each) for each in answers}) == 1 and len(answers) == 2


def test_images_of_an_answer() -> None:
    tool = class_tool("tests.support.rollout.picture_agents:Draw")
    try:
        answer = asyncio.run(tool.call({"seed": 2}, timeout_s=LONG_S))
    finally:
        asyncio.run(tool.close())
    assert answer == ToolAnswer("Here: <image> or <image>", images=(picture(90, 60, 2), picture(60, 90, 1)))
