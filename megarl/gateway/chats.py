"""Answers chats: makes prompts that continue the exact tokens of the session's turns, and texts of responses."""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.chat.tool_calls import ToolFormat, overlap
from megarl.gateway.chat_route import (
    ChatRequest,
    ChatText,
    chat_logprobs,
    cut_at,
    delta_choice,
    finish_of,
    head_of,
    images_of,
    message_of,
    read_turn,
    text_of,
    token_fields,
)
from megarl.gateway.exchange import Exchange
from megarl.gateway.image_urls import ImageUrls
from megarl.gateway.pool_client import Generation
from megarl.gateway.request_fields import ModelLimits, refused
from megarl.gateway.sessions import GatewaySession, RecordedTurn, extended, keys_of, root_key
from megarl.gateway.text import ModelText
from megarl.gateway.token_route import usage_of
from megarl.rollout.engine.response_parts import ResponsePart, first_tokens, tokens_from

_UNFINISHED = "\ufffd"  # decoders write it for bytes of an unfinished character


class TextStream:
    """Gives the content of a running response piece by piece; the pieces add up to the content of the whole turn. Pure.

    It holds back what later tokens may change: the bytes of an unfinished character, the beginning of a stop string,
    and, with tools, everything that may be part of a call.
    """

    def __init__(self, stops: Sequence[str], tools: ToolFormat | None) -> None:
        """`tools`: the format of calls; None if the model was shown no tools."""
        self._stops, self._tools = tuple(stops), tools
        self._sent = ""

    def piece(self, text: str) -> str:
        """Return the next piece that can be sent. `text`: of all tokens so far."""
        sure, stopped = cut_at(text, self._stops)
        if not stopped:
            sure = sure.rstrip(_UNFINISHED)
            may_stop = max((overlap(sure, stop) for stop in self._stops), default=0)
            sure = sure[: len(sure) - may_stop]
        if self._tools is not None:
            sure = self._tools.certain_content(sure)
        return self._send(sure)

    def last_piece(self, turn: ChatText) -> str:
        """Return the rest of the content of a response that has ended."""
        return self._send(turn.content)

    def _send(self, content: str) -> str:
        if not content.startswith(self._sent):
            return ""  # the decoder changed the last characters; the next piece may fit again
        piece, self._sent = content[len(self._sent) :], content
        return piece


STREAM_S = 0.2  # between two pieces of a streamed response
STOPS_S = 0.5  # between two searches for stop strings in a response that is not streamed

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class _Chat:
    """A chat with running responses: the messages `added` after the turn that it continues, and the `key` of all.

    `format`: of tool calls; None if the model is shown no tools.
    """

    request: ChatRequest
    exchange: Exchange
    added: tuple[tuple[str, str], ...]
    key: str
    format: ToolFormat | None


class Chats:
    """Answers chats with one model."""

    def __init__(self, text: ModelText, limits: ModelLimits, model: str, image_hosts: Collection[str] = ()) -> None:
        """`image_hosts`: see `ImageUrls`."""
        self._text, self._limits, self._model, self._urls = text, limits, model, ImageUrls(image_hosts)

    async def answer(self, request: ChatRequest, exchange: Exchange) -> dict[str, Any]:
        """Return the answer to a chat that is not streamed. Raises ApiError."""
        chat = await self._begin(request, exchange, STOPS_S if request.stops else None)
        ends = [[end async for end in self._progress(chat, each)][-1] for each in exchange.responses]
        choices = []
        for index, (part, _, stopped) in enumerate(ends):
            turn = await self._record(chat, index, part)
            choice: dict[str, Any] = {
                "index": index,
                "message": message_of(turn),
                "finish_reason": finish_of(turn, part, stopped),
                "logprobs": await self._logprobs(chat, part),
            }
            choices.append(choice | (token_fields(part) if request.return_token_ids else {}))
        answer = head_of(exchange.id, self._model, int(time.time()), chunk=False)
        answer |= {"choices": choices, "usage": usage_of(len(exchange.prompt_ids), [part for part, _, _ in ends])}
        if request.return_token_ids:
            answer["prompt_token_ids"] = exchange.prompt_ids
        return answer | exchange.fields()

    async def stream(self, request: ChatRequest, exchange: Exchange, send: Send) -> None:
        """Send the chunks of a streamed answer, the first one once the requests are accepted. Raises ApiError."""
        chat = await self._begin(request, exchange, STREAM_S)
        head = head_of(exchange.id, self._model, int(time.time()), chunk=True)
        count = len(exchange.responses)
        first = [delta_choice(index, {"role": "assistant", "content": ""}) for index in range(count)]
        await send({**head, "choices": first})
        parts: list[ResponsePart] = []
        for index in range(count):
            async for delta in self._deltas(chat, index, parts):
                last = index == count - 1 and delta["finish_reason"] is not None
                await send({**head, "choices": [delta]} | (exchange.fields() if last else {}))
        if request.stream_options.include_usage:
            usage = usage_of(len(exchange.prompt_ids), parts)
            await send({**head, "choices": [], "usage": usage} | exchange.fields())

    async def _begin(self, request: ChatRequest, exchange: Exchange, interval_s: float | None) -> _Chat:
        """Make the prompt of a chat, and request its responses. Raises ApiError."""
        kwargs, session = request.chat_template_kwargs, exchange.session
        files = await self._read_images(request.messages)
        keys = keys_of(root_key(request.tools, kwargs), request.messages)
        parent, known = (None, 0) if session is None else _continued(session, keys)
        added: tuple[tuple[str, str], ...] = ()
        before: list[int] = []
        if session is None or parent is None:
            prompt = await self._text.prompt(request.messages, request.tools, kwargs)
        else:
            before, messages = session.ids_through(parent.number), request.messages[known:]
            prompt = await self._text.next_prompt(before, parent.response_ids.tolist(), messages, kwargs)
            added = tuple((each["role"], text_of(each)) for each in messages)
            files = files[sum(len(images_of(each)) for each in request.messages[:known]) :]
        format_ = await self._text.tool_format() if request.tools else None
        prompt, refs = await self._text.placed(prompt, len(before), files)
        choice, shown = request.choice(self._limits, len(prompt)), tuple(zip(refs, files, strict=True))
        exchange.begin(prompt, choice, parent, interval_s, shown)
        return _Chat(request, exchange, added, keys[-1], format_)

    async def _read_images(self, messages: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return the files of a chat's images, and replace the URL of each image part by a digest. Raises ApiError."""
        files: list[bytes] = []
        places = [(at, number, part) for at, each in enumerate(messages) for number, part in enumerate(images_of(each))]
        most = 0 if self._text.images is None else self._text.images.most
        if len(places) > most:
            why = (
                "the model sees no images"
                if self._text.images is None
                else (f"a chat may have {most} images (model.vision.images_per_prompt)")
            )
            raise refused(f"messages[{places[most][0]}].content", why)
        for at, number, part in places:
            try:
                files.append(await self._urls.read(part.pop("url")))
            except ValueError as error:
                raise refused(f"messages[{at}].content", f"image {number + 1} is refused: {error}") from error
            part["sha256"] = hashlib.sha256(files[-1]).hexdigest()
        return files

    async def _progress(self, chat: _Chat, response: Generation) -> AsyncIterator[tuple[ResponsePart, bool, bool]]:
        """Yield (tokens so far, whether that is all, whether a stop string ended it) whenever there are more tokens.

        The last tokens are the whole response, or end with its first stop string. Raises ApiError if it fails.
        """
        known = 0
        while True:
            await response.more_than(known)
            part, ended = response.part, response.ended  # a snapshot: more may come during the search
            if (cut := await self._cut(chat, part)) is not None:
                yield cut, True, True
                return
            if ended:
                yield response.result(), True, False
                return
            yield part, False, False
            known = len(part.response_ids)

    async def _cut(self, chat: _Chat, part: ResponsePart) -> ResponsePart | None:
        """Return a response up to the end of its first stop string, or None."""
        if not chat.request.stops or not part.response_ids:
            return None
        tools = chat.format is not None
        count = await self._text.cut(part.response_ids, chat.request.stops, tools=tools)
        return None if count is None else first_tokens(part, count, "stop")

    async def _record(self, chat: _Chat, index: int, part: ResponsePart) -> ChatText:
        """Record a whole response, choice number `index`, and return its text."""
        text = await self._text.text(part.response_ids, tools=chat.format is not None)
        name = f"{chat.exchange.id}_{index}"
        turn = read_turn(cut_at(text, chat.request.stops)[0], chat.format, chat.request.tools, name)
        key, response = extended(chat.key, message_of(turn)), chat.exchange.responses[index]
        chat.exchange.record(response, part, key=key, messages=chat.added, calls=turn.requested)
        return turn

    async def _logprobs(self, chat: _Chat, part: ResponsePart) -> dict[str, Any] | None:
        if not chat.request.logprobs:
            return None
        return chat_logprobs(await self._text.token_texts(part.response_ids), part.logprobs)

    async def _deltas(self, chat: _Chat, index: int, parts: list[ResponsePart]) -> AsyncIterator[dict[str, Any]]:
        """Yield the choices of the chunks of one response; add the response to `parts` and to the session."""
        stream, known, tools = TextStream(chat.request.stops, chat.format), 0, chat.format is not None
        async for part, whole, stopped in self._progress(chat, chat.exchange.responses[index]):
            new, known = tokens_from(part, min(known, len(part.response_ids))), len(part.response_ids)
            if not whole:
                piece = stream.piece(await self._text.text(part.response_ids, tools=tools))
                if piece or chat.request.logprobs:
                    yield delta_choice(index, _content(piece)) | await self._more(chat, new)
                continue
            turn = await self._record(chat, index, part)
            parts.append(part)
            yield delta_choice(index, _content(stream.last_piece(turn))) | await self._more(chat, new)
            if turn.calls:
                calls = [{"index": number, **call} for number, call in enumerate(turn.calls)]
                yield delta_choice(index, {"tool_calls": calls})
            end = token_fields(part) if chat.request.return_token_ids else {}
            yield delta_choice(index, {}, finish_of(turn, part, stopped), **end)

    async def _more(self, chat: _Chat, new: ResponsePart) -> dict[str, Any]:
        return {"logprobs": await self._logprobs(chat, new)} if chat.request.logprobs else {}


def _content(piece: str) -> dict[str, str]:
    return {"content": piece} if piece else {}


def _continued(session: GatewaySession, keys: Sequence[str]) -> tuple[RecordedTurn | None, int]:
    """Return the session's turn that ends the longest known beginning of a chat, and the beginning's length."""
    for known in range(len(keys) - 1, 0, -1):
        if (turn := session.by_key(keys[known])) is not None:
            return turn, known
    return None, 0
