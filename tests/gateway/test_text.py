"""The format of tool calls that the gateway reads: that of the template, Hermes' where it writes none, or none at
all."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from megarl.chat.named_calls import NamedFormat
from megarl.chat.tokenize import load_tokenizer
from megarl.chat.tool_calls import HERMES, ToolFormat
from megarl.gateway import actor as gateway_actor
from megarl.gateway.actor import GatewayActor
from megarl.gateway.chat_route import read_chat_request
from megarl.gateway.request_fields import ApiError
from megarl.gateway.text import ModelText
from tests.support.gateway.gateway_requests import HEADERS, post
from tests.support.gateway.gateway_stand_in import StandInGateway
from tests.support.models.tiny import make_tiny_model, make_tiny_tokenizer
from tests.support.trainer.configs import config

TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}CALLS{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ '<c>' + c.function.name + BETWEEN + '</c>' }}{% endfor %}"
NAMED = CALLS.replace("BETWEEN", "'<s>' + c.function.arguments | tojson")
UNKNOWN = CALLS.replace("BETWEEN", "'(x=' + c.function.arguments['megarl_key'] | string + ')'")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "1 + 1?"}]}


def model(directory: Path, calls: str) -> Path:
    tokenizer = make_tiny_tokenizer(directory)
    tokenizer.chat_template = TURNS.replace("CALLS", calls)
    tokenizer.save_pretrained(directory)
    return directory


def format_of(directory: Path, **settings: Any) -> ToolFormat:
    with contextlib.closing(ModelText(directory, (2,), **settings)) as text:
        return asyncio.run(text.tool_format())


def test_hermes_takes_the_place_of_no_calls_only(tmp_path: Path) -> None:
    assert format_of(model(tmp_path, "")) is HERMES
    assert format_of(model(tmp_path, NAMED)) == NamedFormat("<c>", "<s>", "</c><c>", "</c>")
    with pytest.raises(ApiError, match=r"^tools: the chat template .* in an unknown form") as refusal:
        format_of(model(tmp_path, UNKNOWN))
    assert (refusal.value.status, refusal.value.field) == (400, "tools")
    assert format_of(tmp_path, form="hermes") is HERMES


@pytest.mark.parametrize("stream", [False, True])
def test_tools_whose_calls_cannot_be_read_are_refused_and_use_up_no_request(tmp_path: Path, stream: bool) -> None:
    """A chat without tools is answered in the same session, which may make one request."""
    with contextlib.closing(StandInGateway(model(tmp_path, UNKNOWN), lambda request: [40, 41, 2])) as gateway:
        sampling = {"max_tokens": 2, "temperature": 1.0, "stop_token_ids": [2]}
        opening = {"sampling": sampling, "most_turns": 1}
        httpx.put(f"{gateway.url}/v1/sessions/s", json=opening, headers=HEADERS, timeout=60).raise_for_status()
        answer = post(gateway, "/in/s/v1/chat/completions", CHAT | {"tools": [TOOL], "stream": stream})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert gateway.call(lambda parts: parts.replicas[0].asked) == []
        assert post(gateway, "/in/s/v1/chat/completions", CHAT).status_code == 200


def test_a_call_of_name_and_json_is_one_of_the_answer(tmp_path: Path) -> None:
    said = '<c>add<s>{"a": 1}</c><c>add<s>{"a": 2}</c>'
    directory = model(tmp_path, NAMED)
    ids = [*load_tokenizer(directory)(said, add_special_tokens=False)["input_ids"], 2]
    with contextlib.closing(StandInGateway(directory, lambda request: ids)) as gateway:
        [choice] = post(gateway, "/v1/chat/completions", CHAT | {"tools": [TOOL]}).json()["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "add", "arguments": f'{{"a": {number}}}'} for number in (1, 2)]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


def test_the_gateway_of_a_run_reads_calls_as_its_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        """Ends the start there."""

    def make(*arguments: Any) -> None:
        raise Made(arguments[2])

    monkeypatch.setattr(gateway_actor, "ModelText", make)
    make_tiny_model(tmp_path)
    actor = object.__new__(GatewayActor)
    actor.spec = SimpleNamespace(pool=SimpleNamespace(max_model_len=None), controller="c")  # type: ignore[assignment]
    for form in ("template", "hermes"):
        actor.config = config(tmp_path, agent={"tool_format": form})
        with pytest.raises(Made, match=form):
            asyncio.run(actor.start())


def test_a_developers_message_is_the_systems() -> None:
    """Templates leave out a message whose role they do not know."""
    request = read_chat_request({"messages": [{"role": "developer", "content": "Be brief."}]})
    assert request.messages == [{"role": "system", "content": "Be brief."}]
