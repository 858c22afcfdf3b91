"""Answers chats: the prompt, which continues the exact tokens of its session's turns, and the text of the response."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.chat.tool_calls import ToolFormat
from megarl.gateway.chat_route import (
    ChatRequest,
    ChatText,
    chat_logprobs,
    cut_at,
    delta_choice,
    finish_of,
    head_of,
    message_of,
    read_turn,
    token_fields,
    usage_of,
)
from megarl.gateway.pool_client import Generation, Generations, checked, ends_of
from megarl.gateway.recording import Recording
from megarl.gateway.request_fields import ModelLimits, SamplingChoice
from megarl.gateway.sessions import ChatTurn, RecordedTurn, extended, keys_of, root_key
from megarl.gateway.text import ModelText
from megarl.rollout.engine.response_parts import ResponsePart, first_tokens, tokens_from

# The text of a response that is still being made: how much of it can be sent already. Pure.
#
# Held back is what later tokens may change: the bytes of an unfinished character, the beginning of a stop string, and,
# where the model may call tools, everything that may turn out to be part of a call.

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character yet


class TextStream:
    """Gives the content of one response piece by piece; the pieces together are the content of the whole turn."""

    def __init__(self, stops: Sequence[str], tools: ToolFormat | None) -> None:
        """`tools`: the format of calls; None if the model was shown no tools."""
        self._stops, self._tools = tuple(stops), tools
        self._sent = ""

    def piece(self, text: str) -> str:
        """Return what can be sent besides what was sent before. `text`: of all tokens so far."""
        sure, stopped = cut_at(text, self._stops)
        if not stopped:
            sure = sure.rstrip(_UNFINISHED)
            sure = sure[: len(sure) - self._may_stop(sure)]
        if self._tools is not None:
            sure = self._tools.certain_content(sure)
        return self._send(sure)

    def last_piece(self, turn: ChatText) -> str:
        """Return what is missing of the content of a response that has ended."""
        return self._send(turn.content)

    def _send(self, content: str) -> str:
        if not content.startswith(self._sent):
            return ""  # a decoder changed its mind about the last characters; the next piece may fit again
        piece, self._sent = content[len(self._sent) :], content
        return piece

    def _may_stop(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        return max((overlap(text, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that `stop` begins with."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)


STREAM_S = 0.2  # between two pieces of a streamed response
STOPS_S = 0.5  # between two looks for stop strings in a response that is not streamed


@dataclass(frozen=True)
class _Chat:
    """A chat on its way: its prompt, the turn that it continues, the `added` messages after it, and the key of all."""

    request: ChatRequest
    request_id: str
    prompt_ids: list[int]
    parent: RecordedTurn | None
    added: tuple[tuple[str, str], ...]
    key: str
    sampling: SamplingChoice
    format: ToolFormat | None


class Chats:
    """Answers chats by one model."""

    def __init__(self, text: ModelText, limits: ModelLimits, generations: Generations, model: str) -> None:
        self._text, self._limits, self._generations, self._model = text, limits, generations, model

    async def answer(self, request: ChatRequest, request_id: str, recording: Recording) -> dict[str, Any]:
        """Return the answer to a chat that is not streamed. Raises ApiError."""
        chat = await self._prepare(request, request_id, recording)
        parts = await self._whole(chat, recording)
        choices = []
        for index, (part, stopped, replica) in enumerate(parts):
            turn = await self._turn(chat, part, index)
            recording.add(chat.prompt_ids, part, chat.parent, request_id, replica, _told(chat, turn))
            choice: dict[str, Any] = {
                "index": index,
                "message": message_of(turn),
                "finish_reason": finish_of(turn, part, stopped),
                "logprobs": await self._logprobs(chat, part),
            }
            choices.append(choice | (token_fields(part) if request.fields.return_token_ids else {}))
        answer = head_of(request_id, self._model, int(time.time()), chunk=False)
        answer |= {"choices": choices, "usage": usage_of(len(chat.prompt_ids), [part for part, _, _ in parts])}
        if request.fields.return_token_ids:
            answer["prompt_token_ids"] = chat.prompt_ids
        return answer | recording.fields()

    async def stream(
        self, request: ChatRequest, request_id: str, recording: Recording
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield the chunks of a streamed answer; None, which is no chunk, as soon as it is sure to begin.

        Raises ApiError.
        """
        chat = await self._prepare(request, request_id, recording)
        head = head_of(request_id, self._model, int(time.time()), chunk=True)
        parts: list[ResponsePart] = []
        async with self._open(chat, recording, STREAM_S) as opened:
            yield None
            first = [delta_choice(index, {"role": "assistant", "content": ""}) for index in range(len(opened))]
            yield {**head, "choices": first}
            for index, generation in enumerate(opened):
                async for delta in self._deltas(chat, index, generation, recording, parts):
                    last = index == len(opened) - 1 and delta["finish_reason"] is not None
                    yield {**head, "choices": [delta]} | (recording.fields() if last else {})
        if request.stream_usage:
            yield {**head, "choices": [], "usage": usage_of(len(chat.prompt_ids), parts)} | recording.fields()

    async def _prepare(self, request: ChatRequest, request_id: str, recording: Recording) -> _Chat:
        """Make the prompt of a chat. Raises ApiError."""
        keys = keys_of(root_key(request.tools, request.fields.chat_template_kwargs), request.messages)
        parent, known = _continued(recording, keys)
        added: tuple[tuple[str, str], ...] = ()
        if parent is None:
            prompt = await self._text.prompt(request.messages, request.tools, request.fields.chat_template_kwargs)
        else:
            before, messages = recording.ids_through(parent), request.messages[known:]
            response = parent.response_ids.tolist()
            prompt = await self._text.next_prompt(before, response, messages, request.fields.chat_template_kwargs)
            added = tuple((each["role"], each["content"]) for each in messages)
        format_ = await self._text.tool_format() if request.tools else None
        sampling = recording.sampling(request.sampling(self._limits, len(prompt)))
        return _Chat(request, request_id, prompt, parent, added, keys[-1], sampling, format_)

    def _open(self, chat: _Chat, recording: Recording, interval_s: float | None) -> Any:  # noqa: ANN401  # a context
        place = recording.place(chat.parent)
        return self._generations.open(chat.prompt_ids, chat.sampling, place, interval_s=interval_s)

    async def _whole(self, chat: _Chat, recording: Recording) -> list[tuple[ResponsePart, bool, int]]:
        """Return each response, whether a stop string ended it, and its replica."""
        stops = chat.request.stops
        async with self._open(chat, recording, STOPS_S if stops else None) as opened:
            if not stops:
                parts = await ends_of(opened)
                return [(part, False, each.replica) for part, each in zip(parts, opened, strict=True)]
            return [await self._until_stop(chat, each) for each in opened]

    async def _until_stop(self, chat: _Chat, generation: Generation) -> tuple[ResponsePart, bool, int]:
        """Return one response up to its first stop string, or whole; see `_whole`."""
        known = 0
        while True:
            await generation.more_than(known)
            part, ended = generation.part, generation.ended  # as they are now: more may come during the search
            if (cut := await self._cut(chat, part)) is not None:
                return cut, True, generation.replica
            if ended:
                return checked(generation), False, generation.replica
            known = len(part.response_ids)

    async def _cut(self, chat: _Chat, part: ResponsePart) -> ResponsePart | None:
        """Return a response up to the end of its first stop string; None if it has none."""
        if not chat.request.stops or not part.response_ids:
            return None
        tools = chat.format is not None
        count = await self._text.cut(part.response_ids, chat.request.stops, tools=tools)
        return None if count is None else first_tokens(part, count, "stop")

    async def _turn(self, chat: _Chat, part: ResponsePart, index: int) -> ChatText:
        """Return the text of a whole response, choice number `index`. Ids of calls tell the choices apart."""
        text = await self._text.text(part.response_ids, tools=chat.format is not None)
        name = f"{chat.request_id}_{index}"
        return read_turn(cut_at(text, chat.request.stops)[0], chat.format, chat.request.tools, name)

    async def _logprobs(self, chat: _Chat, part: ResponsePart) -> dict[str, Any] | None:
        if not chat.request.fields.logprobs:
            return None
        return chat_logprobs(await self._text.token_texts(part.response_ids), part.logprobs)

    async def _deltas(
        self, chat: _Chat, index: int, generation: Generation, recording: Recording, parts: list[ResponsePart]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the choices of the chunks of one response; add the response to `parts` and to the session."""
        stream, known, tools = TextStream(chat.request.stops, chat.format), 0, chat.format is not None
        while True:
            await generation.more_than(known)
            part, ended = generation.part, generation.ended
            cut = await self._cut(chat, part)
            if ended and cut is None:
                part = checked(generation)
            if ended or cut is not None:
                break
            piece = stream.piece(await self._text.text(part.response_ids, tools=tools))
            new, known = tokens_from(part, known), len(part.response_ids)
            if piece or chat.request.fields.logprobs:
                yield delta_choice(index, _content(piece)) | await self._more(chat, new)
        whole = cut or part
        turn = await self._turn(chat, whole, index)
        parts.append(whole)
        recording.add(chat.prompt_ids, whole, chat.parent, chat.request_id, generation.replica, _told(chat, turn))
        last = delta_choice(index, _content(stream.last_piece(turn)))
        yield last | await self._more(chat, tokens_from(whole, min(known, len(whole.response_ids))))
        if turn.calls:
            calls = [{"index": number, **call} for number, call in enumerate(turn.calls)]
            yield delta_choice(index, {"tool_calls": calls})
        end = token_fields(whole) if chat.request.fields.return_token_ids else {}
        yield delta_choice(index, {}, finish_of(turn, whole, cut is not None), **end)

    async def _more(self, chat: _Chat, new: ResponsePart) -> dict[str, Any]:
        return {"logprobs": await self._logprobs(chat, new)} if chat.request.fields.logprobs else {}


def _told(chat: _Chat, turn: ChatText) -> ChatTurn:
    return ChatTurn(extended(chat.key, message_of(turn)), chat.added, turn.requested)


def _content(piece: str) -> dict[str, str]:
    return {"content": piece} if piece else {}


def _continued(recording: Recording, keys: Sequence[str]) -> tuple[RecordedTurn | None, int]:
    """Return the turn of the session that ends the longest beginning of a chat, and how many messages that has."""
    for known in range(len(keys) - 1, 0, -1):
        if (turn := recording.by_key(keys[known])) is not None:
            return turn, known
    return None, 0
