"""Step `te`: the parts of Transformer Engine that a run uses, against plain torch.

Written from transformer-engine 2.11.0 (pytorch/attention/dot_product_attention, pytorch/module/grouped_linear.py,
pytorch/module/linear.py); with the real classes it has run nowhere yet.

Shape suffixes: T packed tokens, N heads, D channels of a head, H hidden size, F outputs.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.smoke.rows import Row, Where
from benchmarks.smoke.transfers import median_s

ALLOWED = 0.05  # largest difference relative to the largest value, bf16


def run(where: Where) -> tuple[list[Row], list[str]]:
    """Check packed attention, the grouped product of experts and fused accumulation of weight gradients."""
    if where.device.type != "cuda":
        return [], ["everything: Transformer Engine needs CUDA"]
    if importlib.util.find_spec("transformer_engine") is None:
        return [], ["everything: transformer_engine is not installed (make setup-gpu)"]
    return measure(where), []


def measure(where: Where) -> list[Row]:
    """Return the rows. With `tiny` shapes it also runs on a CPU, on stand-ins of the three classes."""
    torch.manual_seed(0)
    return [_attention(where), *_grouped(where), _fused_gradient(where)]


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _attention(where: Where) -> Row:
    """Causal attention of three packed sequences, against torch's for each of them."""
    from transformer_engine.pytorch import DotProductAttention

    heads, channels, bounds = (2, 16, [0, 70, 71, 200]) if where.tiny else (16, 128, [0, 700, 701, 2048])
    q_TND, k_TND, v_TND = (
        torch.randn(bounds[-1], heads, channels, device=where.device, dtype=torch.bfloat16) for _ in range(3)
    )
    ends = torch.tensor(bounds, dtype=torch.int32, device=where.device)
    longest = max(stop - start for start, stop in pairwise(bounds))
    attention = DotProductAttention(heads, channels, attn_mask_type="padding_causal", qkv_format="thd")
    found_TF = attention(
        q_TND, k_TND, v_TND, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    parts = []
    for start, stop in pairwise(bounds):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (q_TND, k_TND, v_TND))
        part = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        parts.append(part.transpose(0, 1).flatten(1))
    difference = _difference(found_TF.view(bounds[-1], -1), torch.cat(parts))
    return Row("packed attention: difference / allowed", difference, ALLOWED, 1.0, "")


def _grouped(where: Where) -> list[Row]:
    """The product of experts with uneven numbers of tokens, one of them 0, against a loop."""
    from transformer_engine.pytorch import GroupedLinear

    experts, hidden, outputs = (4, 64, 48) if where.tiny else (32, 2048, 1536)
    splits = [0, *((97 * i) % 400 + 1 for i in range(1, experts))]
    module = GroupedLinear(experts, hidden, outputs, bias=False, params_dtype=torch.bfloat16, device=where.device)
    x_TH = torch.randn(sum(splits), hidden, device=where.device, dtype=torch.bfloat16)
    weights = [getattr(module, f"weight{i}").detach() for i in range(experts)]

    def loop() -> Tensor:
        return torch.cat([part @ weight.t() for part, weight in zip(x_TH.split(splits), weights, strict=True)])

    with torch.no_grad():
        difference = _difference(module(x_TH, splits), loop())
        seconds, plain = median_s(where, lambda: module(x_TH, splits)), median_s(where, loop)
    return [
        Row("grouped product of experts: difference / allowed", difference, ALLOWED, 1.0, ""),
        Row("grouped product of experts / loop over experts", seconds, plain, 100.0 if where.tiny else 1.1, "s"),
    ]


def _fused_gradient(where: Where) -> Row:
    """The weight gradient that is added to fp32 `main_grad` inside the product, twice, against autograd's."""
    from transformer_engine.pytorch import Linear

    hidden, outputs, tokens = (64, 48, 32) if where.tiny else (1024, 2048, 512)
    module = Linear(hidden, outputs, bias=False, params_dtype=torch.bfloat16, device=where.device,
                    fuse_wgrad_accumulation=True)  # fmt: skip
    module.weight.main_grad = torch.zeros(outputs, hidden, dtype=torch.float32, device=where.device)
    expected = torch.zeros_like(module.weight.main_grad)
    for _ in range(2):
        x_TH = torch.randn(tokens, hidden, device=where.device, dtype=torch.bfloat16, requires_grad=True)
        g_TF = torch.randn(tokens, outputs, device=where.device, dtype=torch.bfloat16)
        module(x_TH).backward(g_TF)
        expected += g_TF.float().t() @ x_TH.detach().float()
    return Row("fused weight gradient: difference / allowed",
               _difference(module.weight.main_grad, expected), ALLOWED, 1.0, "")  # fmt: skip
