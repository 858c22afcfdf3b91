"""`POST /v1/chat/completions`, in OpenAI's form. Pure: reads requests and builds answers."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.tool_calls import MalformedCall, ToolCall, ToolFormat, ToolSchemas
from megarl.door.api_errors import refused
from megarl.door.sampling_fields import (
    READ,
    Fields,
    ModelLimits,
    SamplingChoice,
    check_fields,
    flag,
    sampling_of,
    stop_strings,
    text,
    whole,
)
from megarl.door.token_route import finite, wire_spans
from megarl.rollout.response_parts import ResponsePart

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
# Labels and hints of OpenAI's API that change nothing here.
_LABELS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "request_id", "cache_salt", "add_generation_prompt", "continue_final_message")
)  # fmt: skip
_KNOWN = READ | _LABELS | frozenset(
    ("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stop", "stream", "stream_options",
     "max_completion_tokens", "top_logprobs", "response_format", "chat_template_kwargs", "return_token_ids", "priority",
     "modalities")
)  # fmt: skip


@dataclass(frozen=True)
class ChatRequest:
    """Holds a chat. `messages` have text for content and objects for the arguments of tool calls, as templates need."""

    model: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    stops: tuple[str, ...]
    logprobs: bool
    stream: bool
    stream_usage: bool
    return_tokens: bool
    fields: Fields

    def sampling(self, limits: ModelLimits, prompt_tokens: int) -> SamplingChoice:
        """Return what is asked of the engine. Raises ApiError."""
        fields = dict(self.fields)
        if fields.get("max_completion_tokens") is not None:
            fields["max_tokens"] = whole(fields, "max_completion_tokens", 1, 1, 2**63 - 1)
        return sampling_of(fields, limits, prompt_tokens)


def read_chat_request(body: Fields) -> ChatRequest:
    """Read a chat. Raises ApiError naming the field that is wrong or not supported."""
    check_fields(body, _KNOWN)
    if whole(body, "top_logprobs", 0, 0, 20):
        raise refused("top_logprobs", "the door returns the log-prob of the sampled token only; remove it")
    if not flag(body, "parallel_tool_calls", True):
        raise refused("parallel_tool_calls", "the door cannot keep the model from several calls in a turn; remove it")
    if not flag(body, "add_generation_prompt", True) or flag(body, "continue_final_message", False):
        raise refused("continue_final_message", "the door only begins turns of the model; remove it")
    if whole(body, "priority", 0, -(2**63), 2**63 - 1):
        raise refused("priority", "requests of the door rank like those of training; remove it")
    _check_forms(body)
    options = body.get("stream_options") or {}
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict) or not isinstance(options, dict):
        raise refused("chat_template_kwargs" if isinstance(options, dict) else "stream_options", "must be an object")
    return ChatRequest(
        model=text(body, "model", "") or None,
        messages=_messages(body.get("messages")),
        tools=_tools(body),
        template_kwargs=kwargs,
        stops=stop_strings(body),
        logprobs=flag(body, "logprobs", False),
        stream=flag(body, "stream", False),
        stream_usage=flag(options, "include_usage", False),
        return_tokens=flag(body, "return_token_ids", False),
        fields={name: value for name, value in body.items() if name in READ | {"max_completion_tokens"}},
    )


def _check_forms(body: Fields) -> None:
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise refused("response_format", 'the door supports {"type": "text"} only; remove it')
    if body.get("modalities") not in (None, ["text"]):
        raise refused("modalities", "the door answers with text only; remove it")
    if flag(body, "include_stop_str_in_output", False):
        raise refused("include_stop_str_in_output", "the door leaves stop strings out; remove it")
    if not flag(body, "skip_special_tokens", True):
        raise refused("skip_special_tokens", "the door leaves special tokens out; return_token_ids gives them as ids")


def _tools(body: Fields) -> list[dict[str, Any]]:
    """Return the tools that the model is shown."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise refused("tool_choice", 'must be "auto" or "none": the door cannot force the model to call a tool')
    given = body.get("tools") or []
    if not isinstance(given, list):
        raise refused("tools", "must be a list")
    for index, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or not _is_text(function.get("name")):
            raise refused(f"tools[{index}]", "must be a function with a name; other tools are not supported")
    return [] if choice == "none" else given


def _messages(given: object) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise refused("messages", "must be a list of at least one message")
    return [_message(f"messages[{index}]", each) for index, each in enumerate(given)]


def _message(where: str, given: object) -> dict[str, Any]:
    """Return a message as chat templates read it. Raises ApiError."""
    if not isinstance(given, dict) or not _is_one_of(given.get("role"), _ROLES):
        raise refused(where, f"must be an object whose role is one of {', '.join(sorted(_ROLES))}")
    message = {name: value for name, value in given.items() if value is not None}
    message["content"] = _content(where, message.get("content"))
    for name in ("function_call", "audio"):
        if message.get(name):
            raise refused(f"{where}.{name}", "is not supported; use tool_calls and text")
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise refused(f"{where}.tool_calls", "must be a list")
        message["tool_calls"] = [_given_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)
    return message


def _is_one_of(value: object, known: Container[str]) -> bool:
    return isinstance(value, str) and value in known


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where}.content", "must be a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not _is_one_of(part.get("type"), {"text", "refusal"}):
            kind = part.get("type") if isinstance(part, dict) else part
            raise refused(f"{where}.content", f"parts of the type {kind!r} are not supported; the door reads text only")
        value = part.get("text", part.get("refusal"))
        if not isinstance(value, str):
            raise refused(f"{where}.content", "a part has no text")
        texts.append(value)
    return "".join(texts)


def _given_call(where: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not _is_text(function.get("name")):
        raise refused(where, "must be a call of a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refused(f"{where}.function.arguments", "is no JSON") from None
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


# --- answers


@dataclass(frozen=True)
class ChatText:
    """Holds the text of a response: its content, and its tool calls in OpenAI's form.

    `requested`: the calls as a reward function is told of them (`Turn.calls`), those that cannot be read included.
    """

    content: str
    calls: tuple[dict[str, Any], ...] = ()
    requested: tuple[dict[str, Any], ...] = ()


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first stop string in it, and whether there is one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def read_turn(text: str, form: ToolFormat | None, tools: ToolSchemas, name: str) -> ChatText:
    """Return content and calls of a whole turn. `form`: of its calls; None if the model was shown no `tools`.

    `name`: of the turn, by which its calls get ids of their own.

    A turn with a call that cannot be read is content as a whole: OpenAI's form has no place for such a call.
    """
    if form is None:
        return ChatText(text)
    parsed = form.parse(text, tools)
    requested = tuple(
        {"error": call.error} if isinstance(call, MalformedCall) else {"name": call.name, "arguments": call.arguments}
        for call in parsed.calls
    )
    if any(isinstance(call, MalformedCall) for call in parsed.calls):
        return ChatText(text.strip(), requested=requested)
    calls = (call for call in parsed.calls if isinstance(call, ToolCall))
    return ChatText(parsed.content, tuple(_call(f"call_{name}_{i}", call) for i, call in enumerate(calls)), requested)


def _call(name: str, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def message_of(turn: ChatText) -> dict[str, Any]:
    """Return the assistant's message of a response."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message |= {"content": turn.content or None, "tool_calls": list(turn.calls)}
    return message


def finish_of(turn: ChatText, part: ResponsePart, stopped: bool) -> str:
    """Return OpenAI's name of how a response ended. `stopped`: at a stop string."""
    if stopped:
        return "stop"
    if part.finish_reason == "stop" and turn.calls:
        return "tool_calls"
    return part.finish_reason or "abort"


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the log-probs of tokens, whose texts are `tokens`."""
    content = [
        {"token": token, "bytes": list(token.encode()), "logprob": finite(value), "top_logprobs": []}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_fields(part: ResponsePart) -> dict[str, Any]:
    """Return the tokens of a response and the versions that made them, for `return_token_ids`."""
    return {"token_ids": part.response_ids, "weight_versions": wire_spans(part.versions)}


def usage_of(prompt_tokens: int, parts: Sequence[ResponsePart]) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    made = sum(len(part.response_ids) for part in parts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


def head_of(request_id: str, model: str, created: int, *, chunk: bool) -> dict[str, Any]:
    """Return the fields that begin an answer, or each chunk of a streamed one."""
    kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": created, "model": model}


def delta_choice(index: int, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    """Return a choice of a chunk."""
    return {"index": index, "delta": dict(delta), "finish_reason": finish, "logprobs": None, **more}
