"""A harness over the real gateway with a stand-in engine: what it has caused to be sampled becomes its sample's
rows."""

import asyncio
import contextlib
import inspect
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import web

from megarl.chat.tokenize import load_tokenizer
from megarl.common.errors import ToolFailed
from megarl.config.schema.agent import LOOP_TURNS, AgentConfig
from megarl.config.schema.job import TimeoutsConfig
from megarl.environments import gateway_client, harness_loop
from megarl.environments.gateway_client import AttemptLost, GatewayLost
from megarl.environments.harness_loop import Harness, terms_of
from megarl.environments.verifiers_loop import Verifiers
from megarl.gateway.request_fields import SessionTerms, read_terms
from megarl.gateway.token_file import write_gateway_file, write_token
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.loop_host import find_loop
from megarl.rollout.agents.trajectory_builder import sample_rows
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.transport import background
from tests.support.agents.harness_context import ROW, SAMPLING, Context, announce
from tests.support.gateway.gateway_requests import get, post
from tests.support.gateway.gateway_stand_in import TOKEN, StandInGateway


def speak(request: GenerateRequest) -> list[int]:
    """An answer that depends on the prompt's length alone."""
    return [10 + (len(request.prompt_ids) + number) % 20 for number in range(4)]


@pytest.fixture
def gateway(gateways: Any, tmp_path: Path) -> StandInGateway:
    opened: StandInGateway = gateways(speak)
    announce(opened, tmp_path)
    return opened


def harness_of(name: str, **changes: Any) -> Harness:
    made = find_loop(AgentConfig(**{"loop": "harness", "act": f"tests.support.gateway.acts:{name}"} | changes))
    assert isinstance(made, Harness)
    return made


def run(loop: Harness, ctx: Context) -> list[Trajectory]:
    async def bounded() -> list[Trajectory]:
        async with asyncio.timeout(60):
            return await loop.run(ctx)  # type: ignore[arg-type]

    return asyncio.run(bounded())


def test_the_rows_of_a_sample_are_what_the_gateway_has_recorded(gateway: StandInGateway, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    ctx = Context(tmp_path)
    rows = run(harness_of("two_turns", kwargs={"keep": str(kept)}), ctx)
    [file] = kept.iterdir()
    said = json.loads(file.read_text())
    assert said["row"] == ROW and file.stem.startswith("megarl-3-1-")
    turns = said["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 0] and ctx.ended == [3]
    assert [row.key for row in sample_rows(rows, 3, 1)] == ["3:1", "3:1.1"]
    for row, last in zip(rows, (1, 2), strict=True):
        assert row.prompt_ids == turns[0]["prompt_ids"] and row.reward == 0.25 and row.status == "ok"
        assert [*row.prompt_ids, *row.response_ids] == [*turns[last]["prompt_ids"], *turns[last]["response_ids"]]
    trained = [[(t, v) for t, v, m in zip(row.response_ids, row.rollout_logprobs, row.response_mask, strict=True) if m]
               for row in rows]  # fmt: skip
    pairs = [list(zip(turn["response_ids"], turn["logprobs"], strict=True)) for turn in turns]
    assert trained == [pairs[0] + pairs[1], pairs[2]]
    [(judged, dialogue)] = ctx.judged
    assert judged.response_ids == turns[2]["response_ids"]
    assert [(turn.role, turn.tokens) for turn in dialogue][0::2] == [("assistant", 4), ("assistant", 4)]
    assert dialogue[1].role == "user"
    assert gateway.call(lambda parts: len(parts.sessions)) == 0, "the session is ended"


def test_requests_of_a_sample_have_the_sampling_and_the_group_of_the_run(
    gateway: StandInGateway, tmp_path: Path
) -> None:
    """The function has asked for temperature 0, for 8 tokens in two of three requests, and for no seed."""
    run(harness_of("two_turns"), Context(tmp_path))
    asked = gateway.call(lambda parts: list(parts.replicas[0].asked))
    assert [request.sampling for request in asked] == [SAMPLING] * 3
    assert len({request.seed for request in asked} - {None}) == 3
    first, again = Context(tmp_path), Context(tmp_path)
    again.seed = 78
    for ctx in (first, again):
        run(harness_of("two_turns"), ctx)
    seeds = [request.seed for request in gateway.call(lambda parts: list(parts.replicas[0].asked))]
    assert seeds[:3] == seeds[3:6] and not set(seeds[:3]) & set(seeds[6:])


def test_only_samples_that_are_trained_belong_to_a_group(tmp_path: Path) -> None:
    deadline = GroupDeadline(time.monotonic() + 100.0, 200.0, "fail")
    trained, evaluated = Context(tmp_path, deadline), Context(tmp_path)
    evaluated.trains, evaluated.seed = False, None  # type: ignore[misc, assignment]
    sent = terms_of(trained)  # type: ignore[arg-type]
    assert sent.prefix == "group 3" and sent.deadline is not None and 90.0 < sent.deadline.at <= 100.0
    assert (sent.deadline.seconds, sent.deadline.policy) == (200.0, "fail")
    read = read_terms(msgspec.json.decode(msgspec.json.encode(sent)), 1000.0)
    assert read.deadline is not None and read.deadline.at == pytest.approx(1000.0 + sent.deadline.at)
    assert read.deadline.sent(1030.0).at == pytest.approx(sent.deadline.at - 30.0)
    assert terms_of(evaluated) == SessionTerms(SAMPLING, most_turns=LOOP_TURNS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("score", "reward", "components"), [(0.5, 0.5, {}), (1, 1.0, {}), (0.75, 0.75, {"turns": 3.0})]
)
def test_the_function_may_tell_the_reward(
    gateway: StandInGateway, tmp_path: Path, score: Any, reward: float, components: dict[str, float]
) -> None:
    ctx = Context(tmp_path)
    rows = run(harness_of("rewarded", kwargs={"score": score}), ctx)
    assert {(row.reward, tuple(row.reward_components.items())) for row in rows} == {(reward, tuple(components.items()))}
    assert ctx.judged == []


@pytest.mark.parametrize("score", ["1", True])
def test_a_reward_that_is_no_number_is_a_mistake_of_the_function(
    gateway: StandInGateway, tmp_path: Path, score: Any
) -> None:
    with pytest.raises(ToolFailed, match=r"agent.act failed in sample 3:1: ValueError: it returned .*; return None"):
        run(harness_of("rewarded", kwargs={"score": score}), Context(tmp_path))


def test_a_function_that_fails_is_named_and_leaves_no_session(gateway: StandInGateway, tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match=r"agent.act failed in sample 3:1: KeyError: 'no such tool'"):
        run(harness_of("fails"), Context(tmp_path))
    assert gateway.call(lambda parts: len(parts.sessions)) == 0


def test_a_sample_that_asked_for_nothing_has_failed(gateway: StandInGateway, tmp_path: Path) -> None:
    [row] = run(harness_of("nothing"), Context(tmp_path))
    assert row.status == "failed" and "send its name as X-Session-ID" in row.failure


def test_a_function_that_takes_too_long_is_ended_and_its_sample_has_failed(gateways: Any, tmp_path: Path) -> None:
    slow = gateways(speak, pace_s=30.0)
    announce(slow, tmp_path)
    [row] = run(harness_of("two_turns", act_timeout_s=0.5), Context(tmp_path))
    assert row.status == "failed" and row.failure.startswith("sample 3:1 waited 0 s for agent.act to end")
    assert slow.call(lambda parts: len(parts.sessions)) == 0


@pytest.mark.parametrize("policy", ["cut", "fail"])
def test_the_deadline_of_the_group_ends_the_responses(gateways: Any, tmp_path: Path, policy: Any) -> None:
    """Cut, they have the tokens that they had, and the function goes on; else it gets an error."""
    slow = gateways(speak)
    slow.call(lambda parts: setattr(parts.replicas[0], "pause_after", 2))  # what is left of it never comes
    announce(slow, tmp_path)
    deadline = GroupDeadline(time.monotonic() + 2.5, 600.0, policy)
    if policy == "fail":
        with pytest.raises(ToolFailed, match="unfinished at the group's deadline"):
            run(harness_of("two_turns"), Context(tmp_path, deadline))
        return
    [row] = run(harness_of("two_turns"), Context(tmp_path, deadline))
    assert row.status == "ok" and 1 <= len(row.response_ids) < 4 and row.finish_reason == "length"


def test_a_function_has_less_time_after_the_deadline_than_the_trainer_waits_for_its_group(
    gateway: StandInGateway, tmp_path: Path
) -> None:
    """The group's time is short, and so is what comes after it; the function would need more than the test has."""

    async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
        await asyncio.sleep(600)

    deadline = GroupDeadline(time.monotonic() + 0.2, 0.2, "cut", grace_s=0.02)
    [row] = run(Harness(act, 600.0, 1), Context(tmp_path, deadline))
    assert row.status == "failed" and row.failure.startswith("sample 3:1 waited 0 s for agent.act to end")


def test_the_time_of_a_function_is_below_what_the_trainer_waits_for_a_batch() -> None:
    environment_s = inspect.signature(Verifiers).parameters["timeout_s"].default
    assert max(AgentConfig().act_timeout_s, environment_s) < TimeoutsConfig().generate_s


def test_a_sample_that_is_begun_again_has_no_session_but_its_own(gateways: Any, tmp_path: Path) -> None:
    """A process that was killed has left one; those of other samples stay."""
    gateway = gateways(speak, most_sessions=3)
    announce(gateway, tmp_path)
    terms = SessionTerms(SAMPLING)
    for name in ("megarl-3-1-dead", "megarl-3-10-alive", "megarl-13-1-alive"):
        gateway.call(lambda parts, name=name: parts.sessions.open(name, terms, time.monotonic()))

    async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> float:
        await asyncio.to_thread(post, gateway, "/v1/chat/completions", CHAT, **{"X-Session-ID": session})
        return 1.0

    [row] = run(Harness(act, 60.0, 1), Context(tmp_path))
    assert row.status == "ok"
    left = gateway.call(lambda parts: list(parts.sessions._sessions))
    assert left == ["megarl-3-10-alive", "megarl-13-1-alive"]
    evaluated = Context(tmp_path)
    evaluated.trains = False  # type: ignore[misc]
    assert terms_of(evaluated).replaces == ""  # type: ignore[arg-type]


def test_a_loop_that_is_cancelled_ends_soon_though_the_gateway_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert gateway_client.END_S < background.CANCEL_S
    monkeypatch.setattr(gateway_client, "END_S", 0.2)

    async def cancelled() -> None:
        acts = asyncio.Event()

        async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
            acts.set()
            await asyncio.sleep(600)

        async with hanging_gateway(tmp_path):
            loop = Harness(act, 600.0, 1).run(Context(tmp_path))  # type: ignore[arg-type]
            task = asyncio.create_task(loop)
            async with asyncio.timeout(60):
                await acts.wait()
            await background.cancel_all([task], "loops")
            assert task.cancelled()

    with caplog.at_level("INFO"):
        asyncio.run(cancelled())
    assert "was not ended: the gateway at" in caplog.text


@contextlib.asynccontextmanager
async def hanging_gateway(run_dir: Path) -> AsyncIterator[None]:
    """A gateway that opens sessions, and answers nothing else."""

    async def opened(request: web.Request) -> web.Response:
        return web.json_response({"opened": True})

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(600)
        raise AssertionError("nobody waits so long")

    app = web.Application()
    app.add_routes([web.put("/v1/sessions/{name}", opened), web.delete("/v1/sessions/{name}", hang)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    write_gateway_file(run_dir, f"http://{host}:{port}", write_token(run_dir, TOKEN))
    try:
        yield
    finally:
        await runner.cleanup()


def test_a_sample_whose_gateway_dies_is_begun_again_at_the_next_one(
    gateways: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gateways(speak), gateways(speak)
    announce(first, tmp_path)
    attempts: list[str] = []

    async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> float:
        attempts.append(session)
        if len(attempts) == 1:
            first.close()
            announce(second, tmp_path)
            raise ConnectionError("the gateway has died")
        assert base_url.startswith(second.url)
        await asyncio.to_thread(post, second, "/v1/chat/completions", CHAT, **{"X-Session-ID": session})
        return 1.0

    [row] = run(Harness(act, 60.0, 3), Context(tmp_path))
    assert row.status == "ok" and row.reward == 1.0 and len(set(attempts)) == 2

    monkeypatch.setattr(harness_loop, "wait_for_gateway", lambda run_dir: asyncio.sleep(0))

    async def lost(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
        second.call(lambda parts: parts.sessions.end(session))

    with pytest.raises(AttemptLost, match=r"sample 3:1 was started 2 times; the last time .* has no session"):
        run(Harness(lost, 60.0, 2), Context(tmp_path))


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("loss", ["replaced", "idle"])
def test_a_sample_whose_session_is_lost_between_two_turns_is_acted_for_again_and_counts_once(
    gateways: Any, tmp_path: Path, loss: str, handled: bool
) -> None:
    """Another gateway has the same address and token. `handled`: the function goes on after the gateway's error."""
    opened: list[StandInGateway] = [gateways(speak)]
    attempts: list[str] = []
    announce(opened[0], tmp_path)

    def lose() -> None:
        if loss == "idle":
            assert opened[0].call(lambda parts: parts.sessions.expire(time.monotonic() + 10_000.0))
            return
        opened[0].close()
        opened.append(gateways(speak, at=opened[0].port))

    async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> None:
        attempts.append(session)
        async with openai.AsyncOpenAI(
            base_url=base_url, api_key=token, default_headers={"X-Session-ID": session}
        ) as client:
            messages: list[Any] = [{"role": "user", "content": "one"}]
            first = await client.chat.completions.create(model="stand-in", messages=messages, max_tokens=50)
            if len(attempts) == 1:
                await asyncio.to_thread(lose)
            messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "two"}]
            try:
                await client.chat.completions.create(model="stand-in", messages=messages, max_tokens=50)
            except openai.NotFoundError as error:
                assert error.code == "session_not_found"
                if not handled:
                    raise

    ctx = Context(tmp_path)
    [row] = run(Harness(act, 60.0, 3), ctx)
    assert row.status == "ok" and row.response_mask.count(1) == 8
    assert len(set(attempts)) == 2 and ctx.ended == [2] and len(ctx.judged) == 1
    asked = [request for gateway in opened for request in gateway.parts.replicas[0].asked]
    assert [request.sampling for request in asked] == [SAMPLING] * 3
    assert [request.seed for request in asked] == [asked[0].seed, asked[0].seed, asked[2].seed] and asked[2].seed
    assert opened[-1].call(lambda parts: len(parts.sessions)) == 0


def test_a_reward_function_is_told_roles_and_calls_of_the_chats(
    gateways: Any, chat_model: Path, tmp_path: Path
) -> None:
    """A message of the harness in the model's name is not a turn of the model."""
    said = ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>{</tool_call>"]
    ids = load_tokenizer(chat_model)(said, add_special_tokens=False)["input_ids"]
    announce(gateways(lambda request: ids[len(request.prompt_ids) > 200]), tmp_path)
    ctx = Context(tmp_path)
    ctx.prompt.sampling = replace(SAMPLING, max_tokens=100)
    [row] = run(harness_of("calls_a_tool"), ctx)
    [(_, (first, tool, sure, user, last))] = ctx.judged
    assert (first.role, first.calls) == ("assistant", ({"name": "add", "arguments": {"a": 1}},))
    assert [(each.role, each.text) for each in (tool, sure, user)] == [
        ("tool", "2"), ("user", "I am sure."), ("user", "Well?")
    ]  # fmt: skip
    assert last.role == "assistant" and [list(call) for call in last.calls] == [["error"]]
    assert (tool.tokens, sure.tokens, user.tokens) == (0, 0, row.response_mask.count(0))
    assert first.tokens + user.tokens + last.tokens == len(row.response_ids)


def test_the_example_of_the_documentation(gateway: StandInGateway, tmp_path: Path) -> None:
    loop = find_loop(AgentConfig(loop="harness", act="examples.rl.environments.two_guesses:act"))
    ctx = Context(tmp_path, row={"problem": "What is 3 + 4?"})
    [row] = run(loop, ctx)  # type: ignore[arg-type]
    assert row.response_mask[:4] == row.response_mask[-4:] == [1] * 4 and 0 in row.response_mask
    [(judged, dialogue)] = ctx.judged
    assert judged.response_ids == row.response_ids[-4:] and [turn.role for turn in dialogue][1] == "user"


def guesses(gateways: Any, run_dir: Path, max_model_len: int, policy: Any) -> tuple[list[Trajectory], Context]:
    """Run the example, whose second prompt has about 60 tokens more than the first, through a gateway of that
    length."""
    announce(gateways(speak, max_model_len=max_model_len), run_dir)
    ctx = Context(run_dir, row={"problem": "What is 3 + 4?"})
    ctx.toolbox.bounds = AgentConfig(on_overflow=policy)
    return run(harness_of("", act="examples.rl.environments.two_guesses:act"), ctx), ctx


def test_a_prompt_that_does_not_fit_ends_the_sample_after_the_turns_before(gateways: Any, tmp_path: Path) -> None:
    [row], ctx = guesses(gateways, tmp_path, 60, "truncate")
    assert (row.status, row.finish_reason, row.reward, ctx.overflows) == ("ok", "length", 0.25, 1)
    assert len(row.response_ids) == 4 and [judged.response_ids for judged, _ in ctx.judged] == [row.response_ids]


def test_a_prompt_that_does_not_fit_fails_the_sample_alone_if_the_config_says_so(gateways: Any, tmp_path: Path) -> None:
    [row], ctx = guesses(gateways, tmp_path, 60, "fail")
    assert row.status == "failed" and "max_model_len) " in row.failure and row.failure.endswith("(agent.on_overflow)")
    assert not ctx.judged and ctx.overflows == 1


def test_a_failure_after_a_refusal_that_was_handled_is_no_overflow(gateway: StandInGateway, tmp_path: Path) -> None:
    with pytest.raises(ToolFailed, match="LookupError: a mistake of its own"):
        run(harness_of("handles_a_refusal"), Context(tmp_path))


@pytest.mark.parametrize("trains", [True, False])
def test_a_request_beyond_the_turns_of_a_sample_ends_it_by_the_same_policy(
    gateway: StandInGateway, tmp_path: Path, trains: bool
) -> None:
    ctx = Context(tmp_path)
    ctx.trains = trains  # type: ignore[misc]
    ctx.toolbox.bounds = AgentConfig(max_turns=2)
    [row] = run(harness_of("two_turns"), ctx)
    assert (row.status, row.finish_reason, ctx.ended, ctx.overflows) == ("ok", "length", [2], 1)
    ctx.toolbox.bounds = AgentConfig(max_turns=1, on_overflow="fail")
    [row] = run(harness_of("two_turns"), ctx)
    assert row.status == "failed" and "has made the 1 requests that it may make" in row.failure
    ctx.toolbox.bounds = AgentConfig(max_turns=3)
    assert {row.status for row in run(harness_of("two_turns"), ctx)} == {"ok"} and ctx.overflows == 2
    ctx.toolbox.bounds = AgentConfig()
    assert terms_of(ctx).most_turns == LOOP_TURNS  # type: ignore[arg-type]


def test_a_first_prompt_that_does_not_fit_fails_the_sample_under_every_policy(gateways: Any, tmp_path: Path) -> None:
    [row], _ = guesses(gateways, tmp_path, 10, "truncate")
    assert row.status == "failed" and row.failure == "the prompt of the first request has no room for a response"


def test_a_prompt_of_tokens_that_does_not_fit_is_noted_in_its_session_too(gateways: Any) -> None:
    gateway = gateways(speak, max_model_len=4)
    sampling = {"max_tokens": 2, "temperature": 1.0, "stop_token_ids": [2]}
    import httpx

    from tests.support.gateway.gateway_requests import HEADERS

    httpx.put(f"{gateway.url}/v1/sessions/a", json={"sampling": sampling}, headers=HEADERS, timeout=60)
    for path in ("/inference/v1/generate", "/in/a/inference/v1/generate"):
        assert (
            post(gateway, path, {"token_ids": [1], "sampling_params": {"n": 0}}, **{"X-Session-ID": "a"}).status_code
            == 400
        )
    assert get(gateway, "/v1/sessions/a")["refused"] is None
    assert post(gateway, "/in/a/inference/v1/generate", {"token_ids": [1] * 4}).status_code == 400
    assert get(gateway, "/v1/sessions/a")["refused"] == "context_length_exceeded"


def test_a_client_without_headers_names_its_session_in_the_url(gateway: StandInGateway, tmp_path: Path) -> None:
    async def act(base_url: str, token: str, session: str, row: dict[str, Any]) -> float:
        path = f"/in/{session}/v1/chat/completions"
        answer = await asyncio.to_thread(post, gateway, path, CHAT, **{"X-Session-ID": "of somebody else"})
        assert answer.json()["session"]["id"] == session
        assert get(gateway, f"/in/{session}/v1/models")["data"]
        return 0.0

    [row] = run(Harness(act, 60.0, 1), Context(tmp_path))
    assert row.status == "ok" and len(row.response_ids) == 4


async def test_a_gateway_that_stays_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(GatewayLost, match="waited 0 s for the gateway of the run to be open again: FileNotFoundError"):
        await gateway_client.wait_for_gateway(tmp_path, 0.1)
    with pytest.raises(GatewayLost, match="the address of the gateway cannot be read"):
        gateway_client.GatewayClient(tmp_path)


@pytest.mark.parametrize(
    ("act", "changes", "reported"),
    [
        ("no_coroutine", {}, "must be an `async def act"),
        ("absent", {}, "cannot be imported: AttributeError"),
        ("two_turns", {"kwargs": {"kept": 1}}, "cannot be called with .base_url, token, session, row."),
    ],
)
def test_functions_that_cannot_act_are_refused_at_the_start(act: str, changes: Any, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        harness_of(act, **changes)


def test_a_session_is_opened_once_and_with_known_fields(gateway: StandInGateway) -> None:
    import httpx

    from tests.support.gateway.gateway_requests import HEADERS

    def put(name: str, body: Any) -> httpx.Response:
        return httpx.put(f"{gateway.url}/v1/sessions/{name}", json=body, headers=HEADERS, timeout=60)

    sampling = {"max_tokens": 2, "temperature": 1.0, "stop_token_ids": [2]}
    assert put("a", {"sampling": sampling}).status_code == 200
    assert get(gateway, "/v1/sessions/a") == {"id": "a", "refused": None, "turns": []}
    again = put("a", {"sampling": sampling})
    assert again.status_code == 409 and again.json()["error"]["code"] == "session_exists"
    wrong = put("b", {"sampling": sampling | {"temperature": "hot"}})
    assert wrong.status_code == 400 and "sampling.temperature" in wrong.json()["error"]["message"]
    assert put("b", {"sampling": sampling, "grup": {}}).status_code == 400
    answer = post(gateway, "/v1/chat/completions", CHAT | {"max_tokens": 9}, **{"X-Session-ID": "a"}).json()
    assert answer["usage"]["completion_tokens"] == 2
