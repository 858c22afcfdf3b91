"""A model and prompts whose response lengths are known: the chance of the end depends on the prompt's last letter.

The model is a Qwen3 that behaves as a Markov chain. Its embeddings are orthogonal and its layers add little to them, so
the head, set to the wanted log-odds of the next token after each token, decides alone. The letters fall into classes.
A response to a prompt that ends with a letter of one class consists of letters of that class, and after each of them
ends with the class's probability. Layers of any number and width cost what they cost in any other model.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LETTERS = 4  # per class
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
IMPOSSIBLE = -14.0  # log-odds of every other token, against 0 of a letter of the class
# The prompt's last letter is repeated where the response begins, because the chain sees only the token before.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + messages[-1]['content'][-1] }}{% endif %}"
)


@dataclass(frozen=True)
class LengthClass:
    """`share` of the prompts get responses of `mean` tokens on average, EOS included, exponentially distributed."""

    share: float
    mean: float


def letters_of(index: int) -> str:
    """Return the letters of a class."""
    return ALPHABET[index * LETTERS : (index + 1) * LETTERS]


def write_prompts(path: Path, classes: Sequence[LengthClass], count: int, seed: int = 0) -> None:
    """Write `count` different problems; the answer is the letter of their class that the reward asks for."""
    rng = random.Random(seed)
    drawn = rng.choices(range(len(classes)), [each.share for each in classes], k=count)
    rows = [
        {"problem": f"Problem {number}: write {letters_of(index)[0]}", "answer": letters_of(index)[0]}
        for number, index in enumerate(drawn)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def letter_share(response: str, answer: str) -> float:
    """Return the share of the answer's letter in the response: a reward that can be learnt, at any length."""
    return response.count(answer) / max(1, len(response))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters: printable ASCII and newline; anything else is <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "\n", *map(chr, range(32, 127))]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def write_model(directory: Path, classes: Sequence[LengthClass], *, hidden: int, layers: int, seed: int = 0) -> int:
    """Write model and tokenizer; return the number of parameters. `hidden`: a multiple of 64, at least 128."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    vocabulary = math.ceil(len(tokenizer) / 8) * 8
    if hidden < vocabulary or hidden % 64:
        raise ValueError(f"hidden must be a multiple of 64 and at least {vocabulary}: the embeddings are orthogonal")
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 64, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    targets_VV = torch.full((vocabulary, vocabulary), IMPOSSIBLE)  # rows: the token before; columns: the next one
    classes_of = {letter: index for index in range(len(classes)) for letter in letters_of(index)}
    for before in range(vocabulary):
        index = classes_of.get(tokenizer.convert_ids_to_tokens(before) or "", 0)
        targets_VV[before, tokenizer.convert_tokens_to_ids(list(letters_of(index)))] = 0.0
        targets_VV[before, tokenizer.eos_token_id] = eos_log_odds(classes[index].mean)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        basis_VH = torch.linalg.qr(torch.randn(hidden, vocabulary))[0].T
        model.model.embed_tokens.weight.copy_(basis_VH * hidden**0.5)
        model.lm_head.weight.copy_(targets_VV.T @ basis_VH / hidden**0.5)
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id], do_sample=True)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def eos_log_odds(mean: float) -> float:
    """Return the log-odds of EOS against one letter at which a response has `mean` (> 1) tokens on average."""
    return math.log(LETTERS / (mean - 1))


def quantile(values: Sequence[float], q: float) -> float:
    """Return the element at index floor(q n), or the last one, of the sorted values."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
