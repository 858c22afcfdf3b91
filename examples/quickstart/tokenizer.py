"""A byte-level BPE tokenizer trained on the quickstart's text; digits are single tokens, and any text round-trips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|im_end|>"
BEGIN = "<|im_start|>"
PAD = "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on `texts` and add a ChatML template.

    `vocabulary`: the maximum size, including 3 special tokens and 256 single bytes. The size is even, so TP=2 needs no
    padding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BEGIN, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() % 2:
        tokenizer.add_special_tokens(["<|unused|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": [BEGIN]})
    fast.chat_template = chat_template
    return fast


def prompt_text(
    tokenizer: PreTrainedTokenizerFast, problem: str, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Return the text of the chat prompt, generation prompt included. `tools`: schemas of the tools it offers."""
    messages = [{"role": "user", "content": problem}]
    text: str = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return text
