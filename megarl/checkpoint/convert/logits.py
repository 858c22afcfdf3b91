"""Compares the log-probs of two models on the same texts.

This finds a mistake that both directions of the converter share, which a round trip would not show.

A Hugging Face directory is run with `transformers`, a Megatron checkpoint with Megatron-Core, each in fp32 on one
device. Shapes: T tokens of a text, V vocabulary rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.chat.tokenize import load_tokenizer
from megarl.models.hf.model_files import hf_files, megatron_step
from megarl.models.hf.read_config import load_info


@dataclass(frozen=True)
class Agreement:
    """The largest |Δ log-prob| over all tokens and the whole vocabulary, and the tokens with the same top-1 token."""

    max_delta: float
    same_top: int
    tokens: int

    def render(self, tolerance: float) -> str:
        """Return one line that says whether the difference is within `tolerance`."""
        relation = "within" if self.max_delta <= tolerance else "ABOVE"
        return (
            f"log-probs: max |Δ| {self.max_delta:.3e} ({relation} {tolerance:.0e}), top-1 agreement "
            f"{self.same_top} of {self.tokens} tokens\n"
        )


def agreement(one: Path, other: Path, texts: Sequence[str]) -> Agreement:
    """Run both models on the texts, tokenized by the first model's tokenizer, and compare their log-probs.

    Raises ValueError if a text gives no tokens, or the vocabularies differ in size.
    """
    # Transformer Engine multiplies fp32 as TF32, with errors near 1e-3. cuBLAS reads this when it is loaded.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    sizes = [load_info(path).vocab_size for path in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"log-probs cannot be compared: the vocabulary of {one} has {sizes[0]:,} rows, that of {other} {sizes[1]:,}"
        )
    tokenizer = load_tokenizer(one)
    ids = [list(tokenizer(text)["input_ids"]) for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        if not tokens:
            raise ValueError(f"the text {text!r} has no tokens")
    return compare_logprobs(logprobs(one, ids), logprobs(other, ids))


def compare_logprobs(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> Agreement:
    """Compare the log-probs [T, V] of each text by two models; NaN counts as an infinite difference."""
    pairs = list(zip(one, other, strict=True))
    deltas = [(a_TV - b_TV).abs().nan_to_num(nan=float("inf")).max() for a_TV, b_TV in pairs]
    same = [(a_TV.argmax(-1) == b_TV.argmax(-1)).sum() for a_TV, b_TV in pairs]
    return Agreement(float(max(deltas)), int(sum(same)), sum(len(a_TV) for a_TV in one))


def logprobs(path: Path, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the log-probs [T, V] of each text (token ids), fp32 on the CPU."""
    with torch.inference_mode():
        return _by_transformers(path, ids) if megatron_step(path) is None else _by_megatron(path, ids)


def _by_transformers(path: Path, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = load_info(path).vision is not None
    model = (
        (AutoModelForImageTextToText if sees else AutoModelForCausalLM)
        .from_pretrained(hf_files(path), dtype=torch.float32, local_files_only=True, trust_remote_code=False)
        .eval()
    )
    if torch.cuda.is_available():
        model = model.cuda()
    return [model(torch.tensor([each], device=model.device)).logits[0].log_softmax(-1).cpu() for each in ids]


def _by_megatron(path: Path, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl import platforms
    from megarl.checkpoint.format.load_weights import load_weights
    from megarl.models.megatron.build_model import build_model, transformer_config
    from megarl.models.megatron.layout import Layout

    platforms.activate()
    device = platforms.current().device
    with _single_rank():
        info = load_info(path)
        (chunk,) = build_model(info, transformer_config(info, Layout(), "fp32", initialize=False), Layout())
        load_weights([chunk], info, path)
        chunk.eval()
        results = []
        for each in ids:
            bounds = torch.tensor([0, len(each)], dtype=torch.int32, device=device)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=len(each),
                max_seqlen_kv=len(each),
            )
            positions_1T = torch.arange(len(each), device=device)[None]
            logits_1TV = chunk(
                input_ids=torch.tensor([each], device=device),
                position_ids=positions_1T if info.vision is None else positions_1T.expand(3, 1, -1),
                attention_mask=None,
                packed_seq_params=packed,
            )
            results.append(logits_1TV[0, :, : info.vocab_size].float().log_softmax(-1).cpu())
        return results


@contextmanager
def _single_rank() -> Iterator[None]:
    """Initialise torch.distributed and Megatron's groups for this process alone."""
    from megarl.config.schema import TimeoutsConfig
    from megarl.models.megatron.layout import Layout
    from megarl.trainer import parallel

    with tempfile.TemporaryDirectory() as directory:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.FileStore(f"{directory}/store", 1)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            parallel.initialize(Layout(), seed=0, timeout_s=TimeoutsConfig().collective_s)
            try:
                yield
            finally:
                parallel.destroy()
        finally:
            torch.distributed.destroy_process_group()
