"""Makes prompts of chats and texts of responses, in one thread.

The event loop, which serves all clients, does not wait for a long prompt. There is only one thread, because a tokenizer
is not thread-safe.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from megarl.chat.dialogue import Dialogue, DialogueError
from megarl.chat.images import PromptImages
from megarl.chat.tokenize import PromptEncoder, TokenDecoder, load_tokenizer
from megarl.chat.tool_calls import HERMES, ToolFormat
from megarl.chat.tool_format import FormatName, NoCallsWritten, tool_format
from megarl.gateway.request_fields import ApiError, refused
from megarl.queue.images import ImageRef

T = TypeVar("T")

_MOST_DIALOGUES = 16  # sets of template variables whose renderings are kept


class ModelText:
    """Renders chats and decodes tokens of one model. Call its methods only in the event loop."""

    def __init__(
        self, model: Path, stop_token_ids: Sequence[int], form: FormatName = "template",
        images: PromptImages | None = None,
    ) -> None:  # fmt: skip
        """`form`: of tool calls (`agent.tool_format`). `images`: how images are shown; None without vision.

        Raises ValueError if the model has no tokenizer. Without a chat template, chats are refused, but not tokens.
        """
        self._tokenizer, self.images = load_tokenizer(model), images
        self._stops = tuple(stop_token_ids)
        self._decoder = TokenDecoder(self._tokenizer)
        self._dialogues: dict[str, Dialogue] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._form: FormatName = form
        self._format: ToolFormat | None = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Return the token ids of a chat. Raises ApiError if the template refuses it."""
        return await self._run(lambda: self._dialogue(kwargs).start(messages, tools))

    async def next_prompt(
        self, before: list[int], response_ids: Sequence[int], messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> list[int]:  # fmt: skip
        """Return the token ids of a chat that continues after tokens `before`, which end with `response_ids`.

        Raises ApiError if the template would change them.
        """
        return before + await self._run(lambda: self._dialogue(kwargs).next_turn(response_ids, messages))

    async def placed(
        self, ids: list[int], start: int, files: Sequence[bytes]
    ) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return a prompt with the tokens of its images, after its first `start` tokens, and the images' places.

        Raises ApiError for an unusable image.
        """
        if self.images is None or not files:
            return ids, ()
        images = self.images
        long, refs = await self._run(lambda: images.placed(ids[start:], files, "the chat", start))
        return ids[:start] + long, refs

    async def text(self, ids: Sequence[int], *, tools: bool) -> str:
        """Return the text of a turn: with special tokens for `tools`, because calls may use them, else without."""
        if tools:
            return await self._run(lambda: self._dialogue({}).text(ids))
        return await self._run(lambda: self._decoder.texts([ids])[0])

    async def cut(self, ids: Sequence[int], stops: Sequence[str], *, tools: bool) -> int | None:
        """Return the number of tokens up to the end of the first stop string, or None."""

        def stopped(count: int) -> bool:
            part = list(ids[:count])
            text = self._dialogue({}).text(part) if tools else self._decoder.texts([part])[0]
            return any(stop in text for stop in stops)

        def find() -> int | None:
            if not stopped(len(ids)):
                return None
            low, high = 0, len(ids)  # `high` tokens have a stop string, `low` have none
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if stopped(middle) else (middle, high)
            return high

        return await self._run(find)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        return await self._run(
            lambda: self._tokenizer.batch_decode([[each] for each in ids], clean_up_tokenization_spaces=False)
        )

    async def tool_format(self) -> ToolFormat:
        """Return the format in which the model writes tool calls. Raises ApiError if it is unknown."""
        if self._format is None:
            self._format = await self._run(self._find_format, field="tools")
        return self._format

    def _find_format(self) -> ToolFormat:
        try:
            return tool_format(self._form, self._tokenizer)
        except NoCallsWritten:  # most models that can call tools know this format
            return HERMES

    def _dialogue(self, kwargs: Mapping[str, Any]) -> Dialogue:
        key = json.dumps(kwargs, sort_keys=True)
        if (found := self._dialogues.get(key)) is not None:
            return found
        PromptEncoder(self._tokenizer, template_kwargs=kwargs)  # raises for an unknown variable
        if len(self._dialogues) >= _MOST_DIALOGUES:
            del self._dialogues[next(iter(self._dialogues))]
        made = self._dialogues[key] = Dialogue(self._tokenizer, self._stops, kwargs)
        return made

    async def _run(self, function: Callable[[], T], field: str = "messages") -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except DialogueError as error:
            raise refused(field, str(error)) from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error
