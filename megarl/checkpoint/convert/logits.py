"""Compares the log-probs of two models on the same texts, to find mistakes that both conversions share.

A Hugging Face directory runs with `transformers`, a Megatron checkpoint with Megatron-Core, each in fp32 on one device.
Shapes: T tokens of a text, V vocabulary rows, P patches of an image, C values per patch.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.chat.tokenize import load_tokenizer
from megarl.models.architecture.architecture import ModelInfo, VisionTower
from megarl.models.families import FAMILIES
from megarl.models.hf.directory import HFDirectory
from megarl.models.hf.export import exported_config
from megarl.models.hf.model_files import hf_files, megatron_step
from megarl.models.hf.read_config import load_info
from megarl.queue.images import ImageRef, positions


@dataclass(frozen=True)
class Agreement:
    """The largest |Δ log-prob| over all tokens and the vocabulary, and the number of tokens with equal top-1."""

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
    """Run both models on the texts, with the first model's tokenizer, and compare their log-probs.

    Raises ValueError if a text has no tokens or the vocabularies differ in size.
    """
    # Transformer Engine multiplies fp32 as TF32, with errors near 1e-3. cuBLAS reads this on loading.
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
    """Return the log-probs [T, V] of each text (token ids), fp32 on the CPU; vision models also get a picture."""
    with torch.inference_mode():
        return _by_transformers(path, ids) if megatron_step(path) is None else _by_megatron(path, ids)


def _by_transformers(path: Path, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    import transformers

    info = load_info(path)
    kind = getattr(transformers, FAMILIES[info.family].architecture)
    source: dict[str, Any] = {"pretrained_model_name_or_path": hf_files(path), "local_files_only": True}
    if info.raw.get("quantization_config"):  # transformers' own arithmetic is wrong in partial last blocks
        files = HFDirectory(path)
        state = {name: files.rows(name, 0, files.shape(name)[0]) for name in files.names()}
        config = kind.config_class.from_dict(exported_config(info.raw, torch.float32))
        source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}
    model = kind.from_pretrained(**source, dtype=torch.float32, trust_remote_code=False).eval()
    if torch.cuda.is_available():
        model = model.cuda()
    batches: list[dict[str, torch.Tensor]] = [{"input_ids": torch.tensor([each])} for each in ids]
    if info.vision is not None:
        batches.append(_picture(info, info.vision))
    return [
        model(**{name: value.to(model.device) for name, value in each.items()}).logits[0].log_softmax(-1).cpu()
        for each in batches
    ]


SHOWN = ImageRef("picture", 1, 2, 2)  # between a token of text and two others


def _picture(info: ModelInfo, tower: VisionTower) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers for a picture of random pixels with text around it."""
    patches_PC = _pixels(tower)
    mean, std = (torch.tensor(each)[:, None] for each in (tower.mean, tower.std))
    pixels = (patches_PC.view(len(patches_PC), tower.channels, -1) / 255 - mean) / std
    shown = torch.tensor([[0, *[1] * SHOWN.tokens, 0, 0]])
    return {
        "input_ids": torch.where(shown == 1, info.raw["image_token_id"], 1),
        "mm_token_type_ids": shown,
        "pixel_values": pixels.flatten(1),
        "image_grid_thw": torch.tensor([[1, SHOWN.height * tower.merge, SHOWN.width * tower.merge]]),
    }


def _pixels(tower: VisionTower) -> torch.Tensor:
    """Return the patches of SHOWN, uint8 [P, C], equal in every process."""
    shape = (SHOWN.tokens * tower.merge**2, tower.patch_size)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


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
        samples: list[tuple[Sequence[int], dict[str, Any]]] = [(each, {}) for each in ids]
        if info.vision is not None:
            samples.append(_packed_picture(info.vision, device))
        results = []
        for each, more in samples:
            bounds = torch.tensor([0, len(each)], dtype=torch.int32, device=device)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=len(each),
                max_seqlen_kv=len(each),
            )
            places = torch.from_numpy(positions(len(each), [SHOWN] if more else []))[:, None].to(device)
            logits_1TV = chunk(
                input_ids=torch.tensor([each], device=device),
                position_ids=places if info.vision is not None else places[0],
                attention_mask=None,
                packed_seq_params=packed,
                **more,
            )
            results.append(logits_1TV[0, :, : info.vocab_size].float().log_softmax(-1).cpu())
        return results


def _packed_picture(tower: VisionTower, device: torch.device) -> tuple[list[int], dict[str, Any]]:
    """Return the token ids of SHOWN with text around it, and the other inputs of Megatron's model."""
    from megarl.models.megatron.vision_model import ImageBatch

    grid = torch.tensor([[1, SHOWN.height * tower.merge, SHOWN.width * tower.merge]])
    features = torch.arange(SHOWN.tokens)
    images = ImageBatch((("", 0, 0),), grid, features + SHOWN.offset, features, lambda numbers: _pixels(tower))
    return [1] * (SHOWN.end + 2), {"images": images.to(device)}


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
