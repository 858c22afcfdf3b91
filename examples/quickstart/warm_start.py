"""Supervised training of a small model (the warm start), in fp32 with plain torch and transformers.

Shape suffixes: N sequences in the corpus, B sequences per batch, L tokens per padded sequence, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.quickstart.demonstrations import Demonstration
from examples.quickstart.seeing_model import image_inputs

logger = logging.getLogger(__name__)

IGNORED = -100  # label of prompt and padding: cross_entropy's ignore_index


@dataclass(frozen=True)
class WarmStart:
    """The size of supervised training; 450 steps take about a minute on two cores."""

    steps: int = 450
    batch: int = 64
    lr: float = 3e-3
    warmup: int = 40
    threads: int = 2  # fixed, because it affects the order of sums and thus rounding


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Make a randomly initialised Qwen3 of about 0.4 M parameters; its heads and vocabulary are divisible by TP=2."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def encode_corpus(tokenizer: PreTrainedTokenizerFast, demonstrations: list[Demonstration]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels of all demonstrations, both int64 [N, L] and padded on the right."""
    rows = [_encode(tokenizer, each) for each in demonstrations]
    longest = max(len(ids) for ids, _ in rows)
    ids_NL = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels_NL = torch.full((len(rows), longest), IGNORED)
    for index, (ids, labels) in enumerate(rows):
        ids_NL[index, : len(ids)] = torch.tensor(ids)
        labels_NL[index, : len(ids)] = torch.tensor(labels)
    return ids_NL, labels_NL


def _encode(tokenizer: PreTrainedTokenizerFast, item: Demonstration) -> tuple[list[int], list[int]]:
    """Return the token ids and labels of one demonstration. Texts are encoded one by one, as in a dialogue."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in _parts(item):
        part = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * learned
        ids += part
        labels += part if learned else [IGNORED] * len(part)
    return ids, labels


def _parts(item: Demonstration) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a demonstration, and whether the model learns them."""
    yield item.prompt, False
    for index, turn in enumerate(item.turns):
        yield turn, True
        if index < len(item.between):
            yield item.between[index], False


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: list[Demonstration],
    seed: int,
    size: WarmStart,
) -> float:
    """Train `model` in place on the demonstrations; return the mean loss (nats) of the last 20 steps."""
    torch.set_num_threads(size.threads)
    ids_NL, labels_NL = encode_corpus(tokenizer, demonstrations)
    pictures = [each.picture for each in demonstrations if each.picture]
    seen = image_inputs(pictures, model.config.image_token_id) if pictures else None
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, size))
    recent: list[float] = []
    started, reported = time.monotonic(), 0.0
    model.train()
    for step in range(size.steps):
        rows_B = torch.randint(len(ids_NL), (size.batch,), generator=generator)
        images = seen(rows_B, ids_NL[rows_B]) if seen else {}
        logits_BLV = model(input_ids=ids_NL[rows_B], use_cache=False, **images).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BLV[:, :-1].flatten(0, 1), labels_NL[rows_B][:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [*recent[-19:], loss.item()]
        if (seconds := time.monotonic() - started) > reported + 10 or step + 1 == size.steps:
            reported = seconds
            logger.info("warm start: step %d/%d, loss %.4f, %.0f s", step + 1, size.steps, loss.item(), seconds)
    model.eval()
    return sum(recent) / max(len(recent), 1)


def _lr_factor(step: int, size: WarmStart) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then cosine decay to 0.02."""
    if step < size.warmup:
        return (step + 1) / size.warmup
    progress = (step - size.warmup) / max(1, size.steps - size.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
