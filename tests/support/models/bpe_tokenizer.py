"""A small real tokenizer with a chat template, made here: nothing is fetched."""

from typing import Any

from tests.support.checkout import EXCERPTS

SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>", "<pad>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, **specials: str) -> Any:
    """Byte-level BPE trained on the excerpts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train([str(EXCERPTS / "gsm8k.jsonl")], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **specials)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer
