"""`POST /v1/chat/completions`, in OpenAI's form. Pure: reads requests and builds answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megarl.chat.tool_calls import MalformedCall, ToolCall, ToolFormat, ToolSchemas
from megarl.gateway.request_fields import (
    HARMLESS,
    SamplingFields,
    checked,
    read_fields,
    refused,
)
from megarl.gateway.token_route import PRIORITY, finite, version_spans
from megarl.queue.images import IMAGE_MARK
from megarl.rollout.engine.response_parts import ResponsePart

# Labels and hints of OpenAI's API without effect here.
_LABELS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "request_id", "cache_salt")
)  # fmt: skip
_READ_HARMLESS = frozenset(("skip_special_tokens", "include_stop_str_in_output"))
# Why a field must have its default.
_ONLY_DEFAULT = {
    "top_logprobs": "the gateway returns the log-prob of the sampled token only; remove it",
    "parallel_tool_calls": "the gateway cannot limit the model to one call per turn; remove it",
    "add_generation_prompt": "the gateway only begins turns of the model; remove it",
    "continue_final_message": "the gateway only begins turns of the model; remove it",
    "priority": PRIORITY,
    "response_format": 'the gateway supports {"type": "text"} only; remove it',
    "modalities": "the gateway answers with text only; remove it",
    "include_stop_str_in_output": "the gateway leaves stop strings out; remove it",
    "skip_special_tokens": "the gateway leaves special tokens out; return_token_ids gives them as ids",
}
_Text = Annotated[str, Meta(min_length=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(SamplingFields):
    """A chat. The fields of `_ONLY_DEFAULT` must have their defaults.

    After reading, the content of messages is text, or parts if there are images (`images_of`), and arguments of tool
    calls are objects, as templates need.
    """

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str = ""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    stop: _Text | Annotated[list[_Text], Meta(max_length=16)] = msgspec.field(default_factory=list)
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    return_token_ids: bool = False
    top_logprobs: int = 0
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    response_format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class _Named(msgspec.Struct):
    name: _Text
    arguments: Any = msgspec.field(default_factory=dict)


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Named


class _Call(msgspec.Struct):
    function: _Named


class _ImageUrl(msgspec.Struct):
    url: _Text


class _Part(msgspec.Struct):
    type: Literal["text", "refusal", "image_url"]
    text: str | None = None
    refusal: str | None = None
    image_url: _ImageUrl | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    function_call: object = None
    audio: object = None


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read a chat. Raises ApiError naming a wrong or unsupported field."""
    given = read_fields(body, ChatRequest, ignored=_LABELS | HARMLESS - _READ_HARMLESS)
    for name, why in _ONLY_DEFAULT.items():
        if getattr(given, name) != getattr(_DEFAULTS, name):
            raise refused(name, why)
    given.max_tokens = given.max_completion_tokens or given.max_tokens
    if given.tool_choice not in ("auto", "none"):
        raise refused("tool_choice", 'must be "auto" or "none": the gateway cannot force the model to call a tool')
    checked(given.tools, list[_Tool], "tools")
    given.messages = [_message(f"messages[{index}]", each) for index, each in enumerate(given.messages)]
    if given.tool_choice == "none":
        given.tools = []
    return given


def _message(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form for chat templates. Raises ApiError."""
    read = checked(given, _Message, where)
    for name in ("function_call", "audio"):
        if getattr(read, name):
            raise refused(f"{where}.{name}", "is not supported; use tool_calls and text")
    message = {name: value for name, value in given.items() if value is not None and name != "tool_calls"}
    message["content"] = content = _content(where, read.content)
    if not isinstance(content, str) and read.role not in ("user", "tool"):
        raise refused(f"{where}.content", "may have images in messages of user and tool only")
    if read.role == "developer":  # OpenAI's newer name; templates leave out messages of unknown roles
        message["role"] = "system"
    if read.tool_calls:
        calls = zip(given["tool_calls"], read.tool_calls, strict=True)
        message["tool_calls"] = [_given_call(f"{where}.tool_calls[{i}]", *call) for i, call in enumerate(calls)]
    return message


def _content(where: str, content: str | list[_Part] | None) -> str | list[dict[str, str]]:
    """Return a content's text, or with images its parts for templates, where each image still has its `url`."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, str]] = []
    for at, part in enumerate(content):
        text = part.refusal if part.text is None else part.text
        if part.image_url is not None:
            parts.append({"type": "image", "url": part.image_url.url})
        elif text is None:
            raise refused(f"{where}.content[{at}]", "has no text")
        else:
            parts.append({"type": "text", "text": text})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def images_of(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the image parts of a message."""
    content = message["content"]
    return [] if isinstance(content, str) else [part for part in content if part["type"] == "image"]


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with a mark for each image."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", IMAGE_MARK) for part in content)


def _given_call(where: str, given: dict[str, Any], call: _Call) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise refused(f"{where}.function.arguments", "is not JSON") from None
    return {**given, "type": "function", "function": {**given["function"], "arguments": arguments}}


_DEFAULTS = ChatRequest(messages=[])


@dataclass(frozen=True)
class ChatText:
    """The text of a response: its content, and its tool calls in OpenAI's form.

    `requested`: all calls, also malformed ones, as reward functions get them (`Turn.calls`).
    """

    content: str
    calls: tuple[dict[str, Any], ...] = ()
    requested: tuple[dict[str, Any], ...] = ()


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to its first stop string, and whether there is one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def read_turn(text: str, form: ToolFormat | None, tools: ToolSchemas, name: str) -> ChatText:
    """Return content and calls of a whole turn. `form`: of its calls; None if the model was shown no `tools`.

    `name`: of the turn; makes the ids of its calls unique. A turn with a malformed call is content as a whole, because
    OpenAI's form has no place for such a call.
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
    """Return OpenAI's finish reason. `stopped`: at a stop string."""
    if stopped:
        return "stop"
    if part.finish_reason == "stop" and turn.calls:
        return "tool_calls"
    return part.finish_reason or "abort"


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the log-probs of tokens; `tokens`: their texts."""
    content = [
        {"token": token, "bytes": list(token.encode()), "logprob": finite(value), "top_logprobs": []}
        for token, value in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_fields(part: ResponsePart) -> dict[str, Any]:
    """Return the tokens of a response and their weight versions, for `return_token_ids`."""
    return {"token_ids": part.response_ids, "weight_versions": version_spans(part.versions)}


def head_of(request_id: str, model: str, created: int, *, chunk: bool) -> dict[str, Any]:
    """Return the first fields of an answer, or of each chunk of a streamed one."""
    kind = "chat.completion.chunk" if chunk else "chat.completion"
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": created, "model": model}


def delta_choice(index: int, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    """Return a choice of a chunk."""
    return {"index": index, "delta": dict(delta), "finish_reason": finish, "logprobs": None, **more}
