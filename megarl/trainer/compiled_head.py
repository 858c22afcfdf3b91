"""The two passes over a chunk of logits as `torch.compile` fuses them: each reads the logits once or twice.

`logprobs.py` computes the same with separate operations, which on a GPU move about 80 bytes per logit through memory;
it is the reference, and the fallback where compilation fails. Here nothing is overwritten: the compiler keeps all
[C, Vt] intermediates in registers.

Shapes: C rows of a chunk, Vt vocabulary columns of this rank without padding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class RowTerms(NamedTuple):
    """The values per row from which the gradient by a chunk of logits is computed; floats are fp32.

    It is that of g log p[target] + e H by x = logits / temperature: g (1[target] - p) - e p (log p + H).
    """

    lse_C: Tensor  # log-sum-exp of x over the whole vocabulary
    local_C: Tensor  # int64: the target's column here; any column where it is another rank's
    owned_C: Tensor  # bool: the target is one of these columns
    grad_logprobs_C: Tensor  # g
    grad_entropy_C: Tensor | None  # e; None: 0
    entropy_C: Tensor  # H


class _State:
    """The state of this process: `usable` until a first failure to compile the passes."""

    usable = True


def row_stats(logits_CVt: Tensor, local_C: Tensor, temperature: float | Tensor, with_entropy: bool) -> Tensor | None:
    """Return `reduce_rows`, compiled; None if it cannot be compiled here."""
    return _run(reduce_rows, logits_CVt, local_C, temperature, with_entropy)


def grad_logits(logits_CVt: Tensor, terms: RowTerms, temperature: float | Tensor) -> Tensor | None:
    """Return `differentiate_rows`, compiled; None if it cannot be compiled here."""
    return _run(differentiate_rows, logits_CVt, terms, temperature)


def reduce_rows(logits_CVt: Tensor, local_C: Tensor, temperature: float | Tensor, with_entropy: bool) -> Tensor:
    """Return four numbers per row of x = logits / temperature, fp32 [4, C].

    They are the maximum m, the sum of exp(x - m), the target's x, and the sum of exp(x - m) * (x - m), which is 0
    unless `with_entropy`.
    """
    scaled_CVt = logits_CVt.float() / _column(temperature)
    maximum_C = scaled_CVt.amax(dim=1)
    target_C = logits_CVt.gather(1, local_C[:, None]).squeeze(1).float() / temperature
    shifted_CVt = scaled_CVt - maximum_C[:, None]
    exponentials_CVt = shifted_CVt.exp()
    products_C = (exponentials_CVt * shifted_CVt).sum(dim=1) if with_entropy else torch.zeros_like(maximum_C)
    return torch.stack((maximum_C, exponentials_CVt.sum(dim=1), target_C, products_C))


def differentiate_rows(logits_CVt: Tensor, terms: RowTerms, temperature: float | Tensor) -> Tensor:
    """Return the gradient that `RowTerms` states, [C, Vt] in the dtype of the logits."""
    log_p_CVt = logits_CVt.float() / _column(temperature) - terms.lse_C[:, None]
    factor_CVt = -terms.grad_logprobs_C[:, None]
    if terms.grad_entropy_C is not None:
        factor_CVt = factor_CVt - terms.grad_entropy_C[:, None] * (log_p_CVt + terms.entropy_C[:, None])
    columns_Vt = torch.arange(logits_CVt.shape[1], device=logits_CVt.device)
    is_target_CVt = (columns_Vt == terms.local_C[:, None]) & terms.owned_C[:, None]
    grad_CVt = log_p_CVt.exp() * factor_CVt + torch.where(is_target_CVt, terms.grad_logprobs_C[:, None], 0.0)
    return grad_CVt.to(logits_CVt.dtype)


def _column(temperature: float | Tensor) -> float | Tensor:
    """Return a temperature per row, [C], as a column for [C, Vt]; one number as it is."""
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def _run(function: Callable[..., Tensor], *args: object) -> Tensor | None:
    """Return the compiled function's result; None, after one warning, from the first failure on."""
    if not _State.usable:
        return None
    try:
        return _compiled(function)(*args)
    except _compile_errors() as error:  # not errors of the GPU, which may stem from earlier work, nor mistakes here
        _State.usable = False
        logger.warning(
            "the log-prob head could not be compiled and runs uncompiled, which is slower: %s: %s",
            type(error).__name__,
            error,
        )
        return None


@functools.cache
def _compile_errors() -> tuple[type[Exception], ...]:
    """Return what torch 2.13 raises when it cannot trace a function or make its code.

    Dynamo wraps the errors of Inductor, of Triton's compiler and of a missing C++ compiler into its own. A failure in
    Inductor's worker, or in autotuning, comes as it is.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, CppCompileError, InvalidCxxCompiler, *_triton_errors()


def _triton_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Triton's compiler, and of kernels too large for the GPU; none without Triton."""
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return ()
    return CompilationError, OutOfResources, PTXASError


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # The rows of the last chunk differ from batch to batch, so no size may be a constant of the code. Compiling takes
    # no further processes: every rank would start up to 32, each with a torch of its own, for two small functions.
    return torch.compile(function, dynamic=True, options={"compile_threads": 1})
