"""The gateway over replicas in this process: the token route, chats by OpenAI's client, sessions, refusals,
failures."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from megarl.chat.tokenize import load_tokenizer
from megarl.gateway.app import SlowClients
from megarl.rollout.engine.messages import GenerateRequest
from tests.support.checkout import ROOT
from tests.support.gateway.gateway_requests import HEADERS, generate, post
from tests.support.gateway.gateway_stand_in import MODEL, TOKEN, Parts, StandInGateway
from tests.support.waiting import wait_until

START, STOP = 1, 2
Gateways = Callable[..., StandInGateway]


def ids_of(model: Path, text: str) -> list[int]:
    return list(load_tokenizer(model)(text, add_special_tokens=False)["input_ids"])


def saying(model: Path, *texts: str) -> Callable[[GenerateRequest], list[int]]:
    """Says the texts in turn, over and over, and ends each."""
    answers, asked = [[*ids_of(model, text), STOP] for text in texts], iter(range(10**9))
    return lambda request: answers[next(asked) % len(answers)]


def echo(request: GenerateRequest) -> list[int]:
    """Says the last three tokens of the prompt backwards, and ends."""
    return [*reversed(request.prompt_ids[-3:]), STOP]


def client(gateway: StandInGateway, session: str | None = None, **more: Any) -> openai.OpenAI:
    headers = {"X-Session-ID": session} if session else {}
    settings = {"api_key": TOKEN, "max_retries": 0, "timeout": 60, **more}
    return openai.OpenAI(base_url=f"{gateway.url}/v1", default_headers=headers, **settings)


def test_tokens_in_and_out(gateways: Gateways) -> None:
    gateway = gateways(echo)
    gateway.call(lambda parts: setattr(parts.replicas[0], "version", 7))
    answer = generate(gateway, [5, 6, 7, 8], logprobs=1, max_tokens=9)
    [choice] = answer["choices"]
    assert choice["token_ids"] == [8, 7, 6, STOP] and choice["finish_reason"] == "stop"
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 4}]
    for token, entry in zip([8, 7, 6, STOP], choice["logprobs"]["content"], strict=True):
        assert (entry["token_id"], entry["token"]) == (token, f"token_id:{token}")
        assert entry["logprob"] == pytest.approx(-token / 1000)
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    without = generate(gateway, [5, 6, 7, 8], max_tokens=2)["choices"][0]
    assert (without["token_ids"], without["finish_reason"], without["logprobs"]) == ([8, 7], "length", None)


def test_sampling_parameters_reach_the_engine(gateways: Gateways) -> None:
    gateway = gateways(echo, max_model_len=20)
    generate(
        gateway, [5, 6], temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, seed=3, n=2,
        stop_token_ids=[9], max_tokens=1000,
    )  # fmt: skip
    first, second = gateway.call(lambda parts: parts.replicas[0].asked)
    spec = first.sampling
    assert (spec.temperature, spec.top_p, spec.top_k, spec.min_p, spec.repetition_penalty) == (0.5, 0.25, 7, 0.125, 1.5)
    assert spec.stop_token_ids == (STOP, 9) and spec.max_tokens == 18 and second.sampling == spec
    assert first.seed == 3 and second.seed not in {None, 3}
    generate(gateway, [5, 6], ignore_eos=True)
    last = gateway.call(lambda parts: parts.replicas[0].asked)[-1]
    assert last.sampling.ignore_eos and last.sampling.stop_token_ids == () and last.seed is None


def test_models_and_health(gateways: Gateways) -> None:
    gateway = gateways(echo, max_model_len=77)
    [model] = client(gateway).models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 77)  # type: ignore[attr-defined]
    assert httpx.get(f"{gateway.url}/health", timeout=60).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", "Bearer \xe4"]
)
def test_without_the_token_nothing_is_answered(gateways: Gateways, header: str | None) -> None:
    gateway = gateways(echo)
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in [("POST", "/inference/v1/generate"), ("GET", "/v1/models"), ("DELETE", "/v1/sessions/x")]:
        answer = httpx.request(method, gateway.url + path, headers=headers, timeout=60)  # type: ignore[arg-type]
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "invalid_api_key" and TOKEN not in answer.text
    assert gateway.call(lambda parts: parts.replicas[0].asked) == []


def test_a_chat(gateways: Gateways, chat_model: Path) -> None:
    gateway = gateways(saying(chat_model, "Hello you"))
    done = client(gateway).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, max_completion_tokens=50
    )
    [choice] = done.choices
    assert choice.message.content == "Hello you" and choice.finish_reason == "stop"
    prompt = ids_of(chat_model, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [asked] = gateway.call(lambda parts: parts.replicas[0].asked)
    assert asked.prompt_ids == prompt and asked.sampling.max_tokens == 50 and asked.sampling.temperature == 1.0
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == "Hello you<|im_end|>"
    assert done.usage is not None and done.usage.completion_tokens == 10 and done.usage.prompt_tokens == len(prompt)


def test_several_choices_and_parts_of_content(gateways: Gateways, chat_model: Path) -> None:
    gateway = gateways(saying(chat_model, "one", "two"))
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    done = client(gateway).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}], n=2)
    assert [(each.index, each.message.content) for each in done.choices] == [(0, "one"), (1, "two")]
    asked = gateway.call(lambda parts: parts.replicas[0].asked)
    assert asked[0].prompt_ids == ids_of(chat_model, "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n")


def test_a_streamed_chat_is_the_whole_one_in_pieces(gateways: Gateways, chat_model: Path) -> None:
    gateway = gateways(saying(chat_model, "A longer answer in pieces"), pace_s=0.05)
    chunks = list(
        client(gateway).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(pieces) == "A longer answer in pieces"
    tokens = [
        entry.token for each in chunks if each.choices and each.choices[0].logprobs is not None
        for entry in each.choices[0].logprobs.content or []
    ]  # fmt: skip
    assert "".join(tokens) == "A longer answer in pieces<|im_end|>"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 26


def test_the_last_choice_of_a_stream_tells_the_turns_of_all(gateways: Gateways, chat_model: Path) -> None:
    create = client(gateways(saying(chat_model, "one", "two")), session="s").chat.completions.create
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": True}
    chunks: list[Any] = list(create(stream_options={"include_usage": True}, **asked))
    reported = [(len(each.choices), each.session) for each in chunks if "session" in each.model_extra]
    turns = {"id": "s", "turns": [0, 1], "parent": None}
    assert reported == [(1, turns), (0, turns)] and [len(each.choices) for each in chunks[-2:]] == [1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_response_and_the_work_on_it(gateways: Gateways, chat_model: Path, stream: bool) -> None:
    gateway = gateways(saying(chat_model, "abc END of it" + "x" * 3000), pace_s=0.02)
    create = client(gateway, session="s").chat.completions.create
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stop": ["END"]}
    if stream:
        chunks = list(create(stream=True, **asked))
        content = "".join(each.choices[0].delta.content or "" for each in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        [choice] = create(**asked).choices
        content, finish = choice.message.content, choice.finish_reason
    assert (content, finish) == ("abc ", "stop")
    replica = gateway.call(lambda parts: parts.replicas[0])
    wait_until(lambda: len(replica.stopped) == 1, 60, "the replica to be asked to stop")
    [turn] = httpx.get(f"{gateway.url}/v1/sessions/s", headers=HEADERS, timeout=60).json()["turns"]
    assert turn["response_ids"] == ids_of(chat_model, "abc END") and len(turn["logprobs"]) == 7


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_and_its_answer_continue_the_exact_tokens(
    gateways: Gateways, chat_model: Path, stream: bool
) -> None:
    gateway = gateways(saying(chat_model, f"Let me see. {CALL}", "It is 2"), pace_s=0.002 if stream else 0.0)
    create = client(gateway, session="tools").chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "1+1?"}]
    if stream:
        chunks: list[Any] = list(create(model=MODEL, messages=messages, tools=[TOOL], stream=True))  # type: ignore[list-item]
        deltas = [each.choices[0].delta for each in chunks]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not any("session" in each.model_extra for each in chunks[:-1])
        reported = chunks[-1].session
        content = "".join(delta.content or "" for delta in deltas)
        [call] = [call for delta in deltas for call in delta.tool_calls or []]
        reply: Any = {"role": "assistant", "content": content, "tool_calls": [call.model_dump(exclude={"index"})]}
    else:
        whole: Any = create(model=MODEL, messages=messages, tools=[TOOL])  # type: ignore[list-item]
        [choice], reported = whole.choices, whole.session
        assert choice.finish_reason == "tool_calls"
        reply = choice.message.model_dump(exclude_none=True)
    assert reported == {"id": "tools", "turns": [0], "parent": None} and reply["content"] == "Let me see."
    [call] = reply["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1}
    answer = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
    done = create(model=MODEL, messages=[*messages, reply, answer], tools=[TOOL])  # type: ignore[list-item]
    assert done.choices[0].message.content == "It is 2"
    first, second = gateway.call(lambda parts: parts.replicas[0].asked)
    sampled = [*ids_of(chat_model, f"Let me see. {CALL}"), STOP]
    added = ids_of(chat_model, "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
    assert second.prompt_ids == first.prompt_ids + sampled + added
    one, two = httpx.get(f"{gateway.url}/v1/sessions/tools", headers=HEADERS, timeout=60).json()["turns"]
    assert (one["parent"], two["parent"]) == (None, 0)
    assert one["prompt_ids"] == first.prompt_ids and one["response_ids"] == sampled
    assert two["prompt_ids"] == second.prompt_ids
    assert two["logprobs"] == pytest.approx([-each / 1000 for each in two["response_ids"]])


def test_the_sampled_tokens_are_continued_even_if_their_text_has_other_tokens(
    gateways: Gateways, chat_model: Path
) -> None:
    """The unknown token's text is not the token again: a chat that was rendered again would not have it."""
    unknown = 3
    gateway = gateways(lambda request: [unknown, 40, STOP])
    create = client(gateway, session="exact").chat.completions.create
    first = create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
    said = first.choices[0].message.content
    assert unknown not in ids_of(chat_model, said or "")
    messages: list[Any] = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}, {"role": "user", "content": "On"}
    ]  # fmt: skip
    create(model=MODEL, messages=messages)
    one, two = gateway.call(lambda parts: parts.replicas[0].asked)
    assert two.prompt_ids[: len(one.prompt_ids) + 3] == [*one.prompt_ids, unknown, 40, STOP]
    client(gateway).chat.completions.create(model=MODEL, messages=messages)  # without a session: the text's own tokens
    assert unknown not in gateway.call(lambda parts: parts.replicas[0].asked)[-1].prompt_ids


def test_a_session_of_tokens_is_a_tree(gateways: Gateways) -> None:
    gateway = gateways(echo)
    first = generate(gateway, [5, 6, 7], "tree")
    tokens = [5, 6, 7, *first["choices"][0]["token_ids"]]
    left = generate(gateway, [*tokens, 30], "tree")
    right = generate(gateway, [*tokens, 31], "tree")
    other = generate(gateway, [9, 9, 9], "tree")
    assert [each["session"] for each in (first, left, right, other)] == [
        {"id": "tree", "turns": [number], "parent": parent} for number, parent in enumerate([None, 0, 0, None])
    ]
    turns = httpx.get(f"{gateway.url}/v1/sessions/tree", headers=HEADERS, timeout=60).json()["turns"]
    assert [turn["prompt_ids"] for turn in turns] == [[5, 6, 7], [*tokens, 30], [*tokens, 31], [9, 9, 9]]
    assert httpx.delete(f"{gateway.url}/v1/sessions/tree", headers=HEADERS, timeout=60).json() == {"deleted": True}
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, f"{gateway.url}/v1/sessions/tree", headers=HEADERS, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


def test_the_turns_of_a_session_stay_on_the_replica_that_has_its_tokens(gateways: Gateways) -> None:
    gateway = gateways(echo, count=3)
    for round_ in range(4):
        for name in ("a", "b", "c"):
            generate(gateway, [5, 6, 7] if round_ == 0 else [5, 6, 7, 7, 6, 5, STOP, *([8] * round_)], name)
    served = gateway.call(lambda parts: [len(replica.asked) for replica in parts.replicas])
    assert sum(served) == 12
    # A session alone on an idle pool goes to the least loaded replica, the first; then it stays.
    assert served == [12, 0, 0]
    gateway.call(lambda parts: parts.fleet.table.drain(0))
    generate(gateway, [5, 6, 7, 7, 6, 5, STOP, 8], "a")
    gateway.call(lambda parts: setattr(parts.fleet.table[0], "drained", False))
    prompt = [5, 6, 7, 7, 6, 5, STOP, 8, 8, STOP, 5, STOP]
    generate(gateway, prompt, "a")
    assert gateway.call(lambda parts: [len(replica.asked) for replica in parts.replicas]) == [12, 2, 0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("generate", {"sampling_params": {}}, "token_ids"),
        ("generate", {"token_ids": [5, 10**6]}, "token_ids"),
        ("generate", {"token_ids": [5, -1]}, "token_ids"),
        ("generate", {"token_ids": ["5"]}, "token_ids[0]"),
        ("generate", {"token_ids": [5], "features": {}}, "features"),
        ("generate", {"token_ids": [5], "stream": True}, "stream"),
        ("generate", {"token_ids": [5], "priority": 1}, "priority"),
        ("generate", {"token_ids": [5], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
        ("generate", {"token_ids": [5], "sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        ("generate", {"token_ids": [5], "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ("generate", {"token_ids": [5], "sampling_params": {"bad_words": ["x"]}}, "sampling_params.bad_words"),
        ("generate", {"token_ids": [5], "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ("generate", {"token_ids": [5], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ("generate", {"token_ids": [5], "sampling_params": {"temperature": True}}, "sampling_params.temperature"),
        ("generate", {"token_ids": [5], "sampling_params": []}, "sampling_params"),
        ("chat", {}, "messages"),
        ("chat", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": [], "content": ""}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": [], "text": ""}]}]},
         "messages[0].content[0].type"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "tool_choice"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
         "response_format"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "stop": [""]}, "stop[0]"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": 1}}, "logit_bias"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}, "tools[0].type"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "new_field": 1}, "new_field"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "presence_penalty": 0.5}, "presence_penalty"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
         "continue_final_message"),
        ("chat", {"messages": [{"role": "user", "content": "x"}], "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_is_refused_by_name(gateways: Gateways, path: str, body: Any, field: str) -> None:
    gateway = gateways(echo)
    answer = post(gateway, {"generate": "/inference/v1/generate", "chat": "/v1/chat/completions"}[path], body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field and field in error["message"] and error["type"] == "invalid_request_error"
    assert gateway.call(lambda parts: parts.replicas[0].asked) == []


def test_a_request_that_is_refused_keeps_no_session(gateways: Gateways) -> None:
    gateway = gateways(echo)
    for number in range(5):
        body = {"messages": [{"role": "user", "content": "x" * 100_000}]}
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json=body,
            headers={**HEADERS, "X-Session-ID": str(number)},
            timeout=60,
        )
        assert answer.status_code == 400, answer.text
    assert gateway.call(lambda parts: len(parts.sessions)) == 0


def test_fields_without_an_effect_are_accepted(gateways: Gateways) -> None:
    """Those that `renderers` 0.1.12 and OpenAI's clients send besides what counts."""
    gateway = gateways(echo)
    generate(
        gateway, [5, 6, 7], logprobs=1, skip_special_tokens=False, stop_token_ids=[STOP], routed_experts_prompt_start=4,
        presence_penalty=0.0, seed=None, min_tokens=0,
    )  # fmt: skip
    create = client(gateway).chat.completions.create
    create(model=MODEL, messages=[{"role": "user", "content": "x"}], user="me", store=False, frequency_penalty=0.0)


def test_wrong_bodies_and_paths(gateways: Gateways) -> None:
    gateway = gateways(echo, max_model_len=8)

    def send(content: bytes) -> httpx.Response:
        return httpx.post(f"{gateway.url}/inference/v1/generate", content=content, headers=HEADERS, timeout=60)

    assert [send(each).status_code for each in (b"{", b"[1]", b"[" * 10**5)] == [400] * 3
    assert httpx.get(f"{gateway.url}/v1/nothing", headers=HEADERS, timeout=60).status_code == 404
    too_long = post(gateway, "/inference/v1/generate", {"token_ids": [5] * 8})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    other = post(gateway, "/inference/v1/generate", {"token_ids": [5], "model": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    named = post(gateway, "/inference/v1/generate", {"token_ids": [5]}, **{"X-Session-ID": "has a space"})
    assert named.status_code == 400


def test_a_request_in_a_session_of_the_run_that_this_gateway_has_not_opened_is_refused(gateways: Gateways) -> None:
    """A gateway that died may have had it: its turns are lost, and so is how it samples."""
    gateway, name, chat = gateways(echo), "megarl-3-1-0a", {"messages": [{"role": "user", "content": "x"}]}
    tokens = {"token_ids": [5, 6, 7]}
    for path, body in [
        ("/v1/chat/completions", chat), ("/v1/chat/completions", chat | {"stream": True}),
        ("/inference/v1/generate", tokens), (f"/in/{name}/v1/chat/completions", chat),
        (f"/in/{name}/inference/v1/generate", tokens),
    ]:  # fmt: skip
        answer = post(gateway, path, body, **({} if name in path else {"X-Session-ID": name}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found"), path
    assert gateway.call(lambda parts: (len(parts.sessions), parts.replicas[0].asked)) == (0, [])
    opening = {"sampling": {"max_tokens": 2, "temperature": 1.0, "stop_token_ids": [STOP]}}
    httpx.put(f"{gateway.url}/v1/sessions/{name}", json=opening, headers=HEADERS, timeout=60).raise_for_status()
    assert generate(gateway, [5, 6, 7], name)["session"] == {"id": name, "turns": [0], "parent": None}


def test_no_room_for_a_session(gateways: Gateways) -> None:
    gateway = gateways(echo, most_sessions=1)
    generate(gateway, [5, 6, 7], "one")
    answer = post(gateway, "/inference/v1/generate", {"token_ids": [5]}, **{"X-Session-ID": "two"})
    assert answer.status_code == 429 and "there are 1 sessions" in answer.json()["error"]["message"]
    generate(gateway, [5, 6, 7], "one")


def test_a_request_waits_out_a_pause_and_has_two_versions(gateways: Gateways) -> None:
    """A publication pauses the engine: the request goes on afterwards, with the new weights."""
    gateway = gateways(lambda request: list(range(10, 30)))
    replica = gateway.call(lambda parts: parts.replicas[0])
    replica.pause_after = 5

    def resume(parts: Parts) -> None:
        replica.version = 1
        replica.going.set()

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(generate, gateway, [5, 6, 7], max_tokens=20)
        wait_until(lambda: not replica.going.is_set(), 60, "the engine to be paused")
        assert not asked.done()
        gateway.call(resume)
        [choice] = asked.result(60)["choices"]
    assert choice["token_ids"] == list(range(10, 30))
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": 5}, {"version": "1", "start": 5, "end": 20}
    ]  # fmt: skip


def test_a_client_that_goes_away_frees_the_engine(gateways: Gateways) -> None:
    gateway = gateways(lambda request: [10] * 4000, pace_s=0.01)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/inference/v1/generate", json={"token_ids": [5]}, headers=HEADERS,
            timeout=httpx.Timeout(60.0, read=2.0),
        )  # fmt: skip
    wait_until(lambda: gateway.call(lambda parts: len(parts.replicas[0].stopped)) == 1, 60, "the engine to be asked")
    assert gateway.call(lambda parts: parts.replicas[0].working) == 0
    assert gateway.call(lambda parts: parts.pool.open_requests) == 0


def test_a_request_that_takes_too_long_says_for_what_it_waited(gateways: Gateways) -> None:
    gateway = gateways(lambda request: [10] * 4000, pace_s=0.01, timeout_s=0.5)
    answer = post(gateway, "/inference/v1/generate", {"token_ids": [5]})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert "timeouts.generate_s" in error["message"] and "rollout pool" in error["message"]
    wait_until(lambda: gateway.call(lambda parts: parts.replicas[0].working) == 0, 60, "the engine to be free")


def test_a_stream_that_takes_too_long_ends_with_the_error(gateways: Gateways) -> None:
    gateway = gateways(lambda request: [10] * 4000, pace_s=0.01, timeout_s=1.0)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    lines = [line for line in post(gateway, "/v1/chat/completions", chat).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    wait_until(lambda: gateway.call(lambda parts: parts.replicas[0].working) == 0, 60, "the engine to be free")


def test_a_client_that_leaves_a_stream_frees_the_engine(gateways: Gateways) -> None:
    gateway = gateways(lambda request: [10] * 4000, pace_s=0.01)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat, headers=HEADERS, timeout=60) as answer:
        for line in answer.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                break
    wait_until(lambda: gateway.call(lambda parts: len(parts.replicas[0].stopped)) == 1, 60, "the engine to be asked")
    assert gateway.call(lambda parts: parts.pool.open_requests) == 0


def test_a_stream_without_news_says_that_it_goes_on(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.gateway.app.SILENCE_S", 0.05)
    gateway = gateways(echo, serves=False)
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=chat, headers=HEADERS, timeout=60) as answer:
        lines = answer.iter_lines()
        while next(lines) != ": waiting":
            pass
        gateway.call(lambda parts: parts.controller.requests.serve())
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_before_the_first_weights_requests_wait(gateways: Gateways) -> None:
    gateway = gateways(echo, serves=False, timeout_s=3.0)
    answer = post(gateway, "/inference/v1/generate", {"token_ids": [5]})
    assert answer.status_code == 504 and "wait for weights from the trainer" in answer.json()["error"]["message"]
    assert gateway.call(lambda parts: parts.replicas[0].asked) == []
    gateway.call(lambda parts: parts.controller.requests.serve())
    generate(gateway, [5, 6, 7])


@pytest.mark.parametrize("count", [600, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_sessions_at_once(gateways: Gateways, count: int) -> None:
    """Each has two turns; the second continues the first one's tokens.

    The engine makes no token until all first turns are under way: more than the 1024 descriptors that select() could
    wait for.
    """
    gateway = gateways(lambda request: [*reversed(request.prompt_ids[-3:]), 9], pace_s=0.002, timeout_s=600.0)
    replica = gateway.parts.replicas[0]
    gateway.call(lambda parts: replica.going.clear())
    command = [sys.executable, "-m", "tests.support.gateway.gateway_sessions", gateway.url, str(count), "--tokens", "4"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None and clients.stdout is not None
        print(TOKEN, file=clients.stdin, flush=True)
        try:
            wait_until(lambda: gateway.call(lambda parts: replica.working) == count, 240, "all clients to have sent")
            gateway.call(lambda parts: replica.going.set())
            output, _ = clients.communicate(timeout=240)
        finally:
            clients.kill()
    assert clients.returncode == 0
    seen = json.loads(output)
    assert seen["most_open"] == count and [len(each) for each in seen["latencies"]] == [count, count]
    sessions = gateway.call(lambda parts: list(parts.sessions._sessions.values()))
    assert len(sessions) == count and {len(each.turns) for each in sessions} == {2}
    for first, second in (each.turns for each in sessions):
        assert (first.parent, second.parent) == (None, first.number)
        for turn in (first, second):
            assert list(turn.response_ids) == [*reversed(turn.added_ids[-3:]), 9]


def test_a_connection_that_sends_no_request_is_closed(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.gateway.app.SlowClients", lambda: SlowClients(head_s=0.2))
    gateway = gateways(echo)
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as silent:
        silent.sendall(b"POST /inference/v1/generate HTTP/1.1\r\n")
        assert silent.recv(1) == b""
