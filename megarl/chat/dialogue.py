"""A dialogue as token ids that are never tokenized again: a prompt, the model's turns as sampled, and the chat
template's tokens between them.

The tokens between two turns are the difference of two renderings of a small fixed conversation, with and without the
added messages. So they do not depend on the text of the model's turns, and every turn's prompt extends all tokens
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.chat.tokenize import library_tokenizer, special_texts, with_harmless_tools, without_specials

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN = "megarl-turn-of-the-model"  # stands for a turn of the model in the small conversation
_THOUGHT = "megarl-thought-of-the-model"
_PLAIN = {"content": "y", "name": "f", "tool_call_id": "call00000"}
_FIRST = {"role": "user", "content": "x"}
_PROBES = (
    [{"role": "user", "content": "y"}],
    [{"role": "tool", "content": "y", "name": "f", "tool_call_id": "call00000"}],
)


class DialogueError(ValueError):
    """The chat template cannot be used for dialogues of several turns."""


class Dialogue:
    """Renders messages with a tokenizer's chat template. It holds no conversation, so all loops can share it.

    `stop_token_ids` end a turn of the model. `template_kwargs`: variables of the template. Not thread-safe, because the
    tokenizer is not.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises DialogueError for a tokenizer without a chat template."""
        if not getattr(tokenizer, "chat_template", None):
            raise DialogueError("the tokenizer has no chat template: put a chat_template.jinja into model.path")
        self._tokenizer, self._stops = tokenizer, frozenset(stop_token_ids)
        self._kwargs = dict(template_kwargs or {})
        self._specials = special_texts(tokenizer)
        self._library = library_tokenizer(tokenizer)
        self._keeps_reasoning: dict[tuple[str, ...], bool] = {}  # by the roles of the messages that follow
        self._start = ""  # the template's text before the first message
        self._end: str | None = None  # and after a turn; both set when first needed

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a prompt with its generation prompt.

        `messages`: as in OpenAI's API; `tools`: schemas (`megarl.tools.tool.schema_of`). Texts of special tokens in
        tools' messages are broken up, as by `next_turn`. Raises DialogueError if the template refuses the messages or
        does not show the tools to the model.
        """
        messages = with_harmless_tools(messages, self._specials)
        text = self._render(messages, generation=True, tools=tools)
        if tools and text == self._render(messages, generation=True):
            raise DialogueError(
                "the chat template does not show tools to the model; use the template of a variant that was trained "
                "with tools, or write one that renders the variable `tools`"
            )
        return self._encode(text)

    def next_turn(self, response_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids after a turn of the model: its end if missing, `messages`, and the generation prompt.

        `response_ids`: the turn as sampled. A zero-width space breaks up texts of special tokens in the messages, so a
        tool's output cannot begin or end a turn. Raises DialogueError if the template refuses the messages, or would
        change the text before them, such as the reasoning of the turn.
        """
        if "</think>" in self.text(response_ids):
            self._check_reasoning(messages)
        after = self._encode(self._after_turn([self._harmless(message) for message in messages]))
        if response_ids and response_ids[-1] in self._stops and after[:1] and after[0] in self._ends:
            return after[1:]
        return after

    def text(self, response_ids: Sequence[int]) -> str:
        """Return the text of a turn of the model, with special tokens except those that end it."""
        ids = list(response_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        if self._library is not None:  # transformers would inspect every token id first
            text: str = self._library.decode(ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def check(self, tools: bool = False) -> None:
        """Raise DialogueError if a user's message, or with `tools` a tool's, cannot follow a turn of the model.

        A tool's message with `tools`, else a user's, must not remove the reasoning of the turn.
        """
        for messages in _PROBES if tools else _PROBES[:1]:
            self._after_turn(messages)
        self._check_reasoning(_PROBES[1 if tools else 0])

    def _check_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise DialogueError if the template removes the reasoning of a turn when `messages` follow it."""
        kind = tuple(str(message.get("role")) for message in messages)
        if kind not in self._keeps_reasoning:
            turn = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{TURN}"}
            plain = [{"role": role, **_PLAIN} for role in kind]
            texts = [self._render([_FIRST, turn, *plain])]
            with suppress(DialogueError):  # a later turn may be refused after a tool that was never called
                texts.append(self._render([_FIRST, turn, *plain, {"role": "assistant", "content": TURN}, *plain]))
            self._keeps_reasoning[kind] = all(_THOUGHT in text for text in texts)
        if not self._keeps_reasoning[kind]:
            raise DialogueError(
                f"the chat template removes the reasoning of a turn when a message of the role {kind[0]} follows, so "
                "the model would be trained on another context than it is used with; use a template that keeps it"
            )

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The tokens that may end a turn: the stop tokens, and the template's first token there if it is special."""
        first = self._encode(self._turn_end())[:1]
        special = set(self._tokenizer.all_special_ids)
        return self._stops | (set(first) & special)

    def _turn_end(self) -> str:
        """Return the template's text after the last turn."""
        if self._end is None:
            text = self._render([_FIRST, {"role": "assistant", "content": TURN}])
            if text.count(TURN) != 1:
                raise DialogueError("the chat template does not write an assistant's content exactly once")
            self._start, self._end = text.partition(str(_FIRST["content"]))[0], text.partition(TURN)[2]
        return self._end

    def _after_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        end = self._turn_end()
        text = self._render([_FIRST, {"role": "assistant", "content": TURN}, *messages], generation=True)
        # Split at the first place: the added messages may contain the same text.
        _, found, after = text.partition(TURN)
        if not found or not text.startswith(self._start) or not after.startswith(end) or len(after) == len(end):
            raise DialogueError(
                "the chat template changes the text before a message when the message is added, so earlier turns would "
                "have other tokens than the sampled ones; use a template that only appends"
            )
        return after

    def _harmless(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.get("role") == "assistant":
            return message
        return without_specials(message, self._specials)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:  # TypeError: templates add strings to other types
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DialogueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        # The template writes its special tokens itself; the tokenizer must not add a BOS.
        if self._library is not None and self._library.padding is None and self._library.truncation is None:
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
            return ids
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
