"""Step `head`: the chunked log-probs of the response tokens against a compiled plain computation.

Shape suffixes: R rows (response tokens), H hidden size, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.lib.report import Ratio
from benchmarks.smoke.rows import Where, row
from benchmarks.smoke.transfers import median_s

CHUNK = 1024


def plain(hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the targets, as one would write them without chunks."""
    logits_RV = torch.mm(hidden_RH, weight_VH.t()).float()
    logprobs_RV = logits_RV.log_softmax(-1)
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    return logprobs_RV.gather(1, targets_R[:, None])[:, 0], entropy_R


def run(where: Where) -> tuple[list[Ratio], list[str]]:
    """Compare values, gradients and time of forward and backward, with entropies, at Qwen3's vocabulary."""
    rows, hidden, vocabulary = (64, 64, 1000) if where.tiny else (1024, 4096, 151936)
    dtype = torch.float32 if where.tiny else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    hidden_RH = torch.randn(rows, hidden, generator=generator).to(where.device, dtype).requires_grad_()
    weight_VH = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(where.device, dtype)
    weight_VH.requires_grad_()
    targets_R = torch.randint(0, vocabulary, (rows,), generator=generator).to(where.device)
    # On a CPU inductor would call a C++ compiler; `eager` tests the same code of this step.
    compiled = torch.compile(plain, backend="eager" if where.tiny else "inductor")

    def head(compile_passes: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        from megarl.trainer.logprobs import linear_token_logprobs

        logprobs_R, entropy_R = linear_token_logprobs(
            *tensors, temperature=1.0, vocab_size=vocabulary, chunk=CHUNK, with_entropy=True, compiled=compile_passes
        )
        assert entropy_R is not None
        return logprobs_R, entropy_R

    eager = partial(head, False)
    chunked = eager if where.tiny else partial(head, True)  # the default of a run on this device

    def both_ways(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        hidden_RH.grad = weight_VH.grad = None
        logprobs_R, entropy_R = function(hidden_RH, weight_VH, targets_R)
        (logprobs_R.sum() + 0.1 * entropy_R.sum()).backward()
        assert hidden_RH.grad is not None
        return logprobs_R.detach(), entropy_R.detach(), hidden_RH.grad.clone()

    ours, theirs = both_ways(chunked), both_ways(compiled)
    names, allowed = ("log-probs", "entropies", "gradients"), 1e-4 if where.tiny else 5e-2
    rows_of_table = [
        row(f"{name}: largest difference / allowed", float((a.float() - b.float()).abs().max()), allowed, 1.0, "")
        for name, a, b in zip(names, ours, theirs, strict=True)
    ]
    seconds = median_s(where, lambda: both_ways(chunked))
    reference = median_s(where, lambda: both_ways(compiled))
    details = {
        "ms_per_1k_tokens": seconds / rows * 1e6,
        "not_compiled_ms_per_1k_tokens": median_s(where, lambda: both_ways(eager)) / rows * 1e6,
        "plain_formula_ms_per_1k_tokens": reference / rows * 1e6,
    }
    bound = 10.0 if where.tiny else 1.5
    rows_of_table.append(
        row("forward and backward / torch.compile of the plain formula", seconds, reference, bound, "s", details)
    )
    return rows_of_table, []
