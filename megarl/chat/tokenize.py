"""Encodes prompts with the tokenizer's chat template, decodes responses, and finds the token ids that end them."""

from __future__ import annotations

import copy
import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.chat.formats import Message, Prompt
from megarl.chat.images import PromptImages, in_parts
from megarl.models.hf.model_files import hf_files
from megarl.queue.images import ImageRef
from megarl.rewards.types import REASONING_TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenDecoder:
    """Decodes responses for reward functions with a copy of the tokenizer, so that another thread may encode.

    Encoding by transformers changes settings of the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._library = library_tokenizer(self._tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marks = [mark for tags in REASONING_TAGS for mark in tags]
        self._marks = {
            int(i): token.content
            for i, token in added.items()
            if token.special and any(token.content in mark for mark in marks)
        }

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of token ids without special tokens, except those that begin or end reasoning.

        These are special tokens of some models, such as Mistral's, and ordinary tokens of others.
        """
        if all(self._marks.keys().isdisjoint(ids) for ids in sequences):
            return self._unmarked(sequences)
        return ["".join(self._pieces(ids)) for ids in sequences]

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        for mark, run in groupby(ids, self._marks.get):
            tokens = list(run)
            yield from self._unmarked([tokens]) if mark is None else [mark] * len(tokens)

    def _unmarked(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        if self._library is not None:
            # Directly: transformers would inspect every token id first, and this releases the GIL.
            texts: list[str] = self._library.decode_batch(sequences, skip_special_tokens=True)
            return texts
        return [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in sequences]


def library_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:  # noqa: ANN401  # the library has no types
    """Return the tokenizer of the `tokenizers` library behind `tokenizer`, if it encodes and decodes the same.

    Its `encode` equals a call of `tokenizer` while it neither pads nor truncates.
    """
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if tokenizer.clean_up_tokenization_spaces or tokenizer.split_special_tokens:
        return None
    unchanged = all(
        getattr(own, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode", "__call__", "_encode_plus")
    )
    return tokenizer.backend_tokenizer if unchanged else None


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the special tokens, longer ones first, because one may contain another."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = set(tokenizer.all_special_tokens) | {token.content for token in added.values() if token.special}
    return sorted(found, key=len, reverse=True)


def without_specials(message: Mapping[str, Any], specials: Sequence[str]) -> dict[str, Any]:
    """Return a message with the texts of special tokens broken up by a zero-width space, in its parts too.

    A tool's output is untrusted: with special tokens it could end the tool's message and begin a turn of the model.
    """
    return {key: _harmless(value, specials) for key, value in message.items()}


def _harmless(value: object, specials: Sequence[str]) -> object:
    if isinstance(value, list):
        return [without_specials(each, specials) if isinstance(each, dict) else each for each in value]
    return _broken_up(value, specials) if isinstance(value, str) else value


def with_harmless_tools(messages: Sequence[Mapping[str, Any]], specials: Sequence[str]) -> list[dict[str, Any]]:
    """Return the messages of a conversation, with those of tools `without_specials`."""
    return [without_specials(each, specials) if each.get("role") == "tool" else dict(each) for each in messages]


def _broken_up(text: str, specials: Sequence[str]) -> str:
    for special in specials:
        text = text.replace(special, f"{special[:1]}\u200b{special[1:]}")
    return text


log = logging.getLogger(__name__)

_MARKER = "megarl-end-of-turn-probe"
END_TOKENS = 16  # of a prompt, for rewards: more than any template writes after the last message


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the limit of its encoder."""


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory or Megatron checkpoint, without downloads.

    Raises ValueError if that fails.
    """
    from transformers import AutoTokenizer

    try:
        # The default, None, may ask on a terminal whether to run Python code that comes with the model.
        return AutoTokenizer.from_pretrained(str(hf_files(model_dir)), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model_dir} has no tokenizer that can be loaded: {error}") from error


class PromptEncoder:
    """Applies the chat template with its generation prompt.

    `setting` and `fix`: for messages, where `max_prompt_tokens` comes from and what to do. `skipped` counts the prompts
    left out with `overlong="skip"`. `tools`: schemas of the tools that prompts show. `images`: how images are shown;
    None without vision. Raises ValueError if the tokenizer has no template, if one of the `template_kwargs` is not one
    of its variables, or if it does not show tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int | None = None,
        overlong: Literal["error", "skip"] = "error",
        setting: str = "data.max_prompt_tokens",
        fix: str = "raise it, or set data.overlong_prompts: skip",
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        images: PromptImages | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template: put a chat_template.jinja into model.path, or take the "
                "tokenizer of the instruction-tuned variant"
            )
        self.template_kwargs = dict(template_kwargs or {})
        self.tools = [dict(tool) for tool in tools]
        _check_template_kwargs(tokenizer, self.template_kwargs)
        self.tokenizer, self._images = tokenizer, images
        self._specials = special_texts(tokenizer)
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong = overlong
        self.setting, self.fix = setting, fix
        self.skipped = 0
        if self.tools:
            self._check_shows(self.tools)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with the template's special tokens but none from tools' messages.

        Raises PromptTooLongError (a ValueError) above `max_prompt_tokens`, whatever `overlong` is; prompts at
        positions that `valid_indices` returned never raise it. Raises ValueError if the template refuses the messages.
        """
        return self.encode_images(prompt)[0]

    def encode_images(self, prompt: Prompt) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return what `encode` does, with the tokens of each image, and the images' places.

        Also raises ValueError for unusable images, and for any image without a vision tower.
        """
        ids, images = self._placed(prompt)
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"{prompt.name} has {len(ids)} tokens, more than {self.setting} = {self.max_prompt_tokens}; {self.fix}"
            )
        return ids, images

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt's last tokens, where a template may open the model's reasoning."""
        return str(self.tokenizer.decode(ids[-END_TOKENS:]))

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt of any length."""
        return self._placed(prompt)[0]

    def _placed(self, prompt: Prompt) -> tuple[list[int], tuple[ImageRef, ...]]:
        ids = self._ids(self._shown(prompt), prompt.name, self._tools_of(prompt))
        if self._images is None and prompt.images:
            raise ValueError(f"{prompt.name} has images, and the model has no vision tower; remove data.images_field")
        if self._images is None:
            return ids, ()
        if prompt.row.get("images"):
            raise ValueError(
                f"{prompt.name} has a column `images`, which the model would not be shown; set data.images_field: "
                "images, or remove the column"
            )
        return self._images.placed(ids, prompt.images, prompt.name)

    def _shown(self, prompt: Prompt) -> list[Message]:
        messages = with_harmless_tools(prompt.messages, self._specials)
        return in_parts(messages) if prompt.images else messages

    def valid_indices(self, prompts: Sequence[Prompt]) -> Sequence[int]:
        """Return the positions of the prompts that fit `max_prompt_tokens`, and count the others in `skipped`.

        With `overlong="error"` the first one that does not fit raises PromptTooLongError. Raises ValueError if none
        fits. Only prompts whose bytes could exceed the limit are tokenized, and no token ids are kept.
        """
        if self.max_prompt_tokens is None:
            return range(len(prompts))
        # An upper bound without tokenizing: a token has at least one byte of text, and the template adds to each
        # message at most what it adds to a conversation of one message.
        overhead = len(self._ids([{"role": "user", "content": "x"}], "a one-letter prompt", self.tools))
        valid = array("q")
        self.skipped = 0
        for position, prompt in enumerate(prompts):
            messages = with_harmless_tools(prompt.messages, self._specials)
            shown = [*messages, *(self._tools_of(prompt) if prompt.tools else [])]
            bound = sum(len(json.dumps(each, ensure_ascii=False).encode()) + overhead for each in shown)
            try:
                if bound > self.max_prompt_tokens or self._images is not None:
                    self.encode(prompt)
                valid.append(position)
            except PromptTooLongError as error:
                if self.overlong == "error":
                    raise
                self.skipped += 1
                log.debug("skipped: %s", error)
        if not valid:
            raise ValueError(
                f"all {len(prompts)} prompts are longer than {self.setting} = {self.max_prompt_tokens} tokens; "
                f"{self.fix.partition(', or ')[0]}"
            )
        if self.skipped:
            log.warning("%d of %d prompts skipped as too long", self.skipped, len(prompts))
        return valid

    def _tools_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the tools that a prompt shows. Raises ValueError for one of the row's that the run does not have."""
        if not prompt.tools:
            return self.tools
        names = {tool["function"]["name"] for tool in self.tools}
        missing = [each["function"]["name"] for each in prompt.tools if each["function"]["name"] not in names]
        if names and missing:
            raise ValueError(f"{prompt.name} has the tool {missing[0]!r}, which is none of the run's: {sorted(names)}")
        tools = [dict(tool) for tool in prompt.tools]
        self._check_shows(tools)
        return tools

    def _check_shows(self, tools: list[dict[str, Any]]) -> None:
        if "tools" not in self.tokenizer.get_chat_template(tools=tools):
            raise ValueError(
                "the chat template does not show tools to the model; use the template of a variant that was trained "
                "with tools, or write one that renders the variable `tools`"
            )

    def _ids(self, messages: list[Message], what: str, tools: list[dict[str, Any]]) -> list[int]:
        text = self._text(messages, what, tools)
        # The template writes its special tokens itself; the tokenizer must not add a second BOS.
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if not ids:
            raise ValueError(f"{what}: the chat template makes no tokens of its messages")
        return ids

    def render(self, prompt: Prompt) -> str:
        """Return the text that `encode` tokenizes. Raises ValueError if the template refuses the messages."""
        return self._text(self._shown(prompt), prompt.name, self._tools_of(prompt))

    def _text(self, messages: list[Message], what: str, tools: list[dict[str, Any]]) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **self.template_kwargs
                )
            )
        except Exception as error:  # from the template's expressions
            raise ValueError(f"{what}: the chat template refuses its messages: {error}") from error


def _check_template_kwargs(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that the chat template does not read."""
    if not template_kwargs:
        return
    from jinja2 import Environment, TemplateSyntaxError, meta

    source = tokenizer.get_chat_template()
    try:
        known = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
    except TemplateSyntaxError:  # it uses an extension of transformers, such as {% generation %}
        known = {name for name in template_kwargs if name in source}
    known -= {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
    if unknown := sorted(set(template_kwargs) - known):
        raise ValueError(
            f"chat_template_kwargs: {', '.join(unknown)}: no variable of the model's chat template, so it would change "
            f"nothing; the template reads {', '.join(sorted(known)) or 'none'}"
        )


def stop_token_ids(
    model_dir: Path | str, tokenizer: PreTrainedTokenizerBase, configured: Sequence[int] | None = None
) -> list[int]:
    """Return the token ids that end a response, ascending.

    These are `configured`, if given; otherwise `eos_token_id` of generation_config.json, the tokenizer's EOS, and the
    special token that ends an assistant's turn in the chat template. Raises ValueError if there is none, or if one is
    outside the tokenizer's vocabulary.
    """
    if configured is not None:
        found, source = set(configured), "sampling.stop_token_ids"
    else:
        found, source = generation_config_eos(model_dir), "generation_config.json or the tokenizer"
        if getattr(tokenizer, "eos_token_id", None) is not None:
            found.add(int(tokenizer.eos_token_id))
        found |= end_of_turn_ids(tokenizer)
    if not found:
        raise ValueError(
            f"no stop token: {model_dir} has no eos_token_id in generation_config.json, its tokenizer no EOS, "
            "and its chat template ends no turn with a special token; set sampling.stop_token_ids"
        )
    outside = sorted(i for i in found if not 0 <= i < len(tokenizer))
    if outside:
        raise ValueError(f"stop token ids {outside} of {source} are outside the vocabulary of {len(tokenizer)}")
    return sorted(found)


def generation_config_eos(model_dir: Path | str) -> set[int]:
    """Return the `eos_token_id` (a number or a list) of generation_config.json, or an empty set.

    Raises ValueError if the file is not a JSON object.
    """
    path = hf_files(model_dir) / "generation_config.json"
    if not path.is_file():
        return set()
    try:
        value = json.loads(path.read_text()).get("eos_token_id")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    if value is None:
        return set()
    return {int(i) for i in value} if isinstance(value, list) else {int(value)}


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the id of the special token that the chat template writes after an assistant's message, if any."""
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARKER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        log.info("the chat template does not render an assistant's turn: %s", error)
        return set()
    tail = text.rpartition(_MARKER)[2].lstrip() if _MARKER in text else ""
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
    return {int(ids[0])} & _special_ids(tokenizer) if ids else set()


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(i) for i in tokenizer.all_special_ids} | {int(i) for i, t in added.items() if t.special}
